// Metal functions as CUDA, for NVRTC: the passes that CUDA shares with the CPU, what it needs
// beside them, and the kernel that calls the function for each thread of a launch.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "passes.h"
#include "rewrite.h"

namespace zmlx {

// The text with its `#pragma unroll` lines as _Pragma operators, which the preprocessor keeps.
std::string keep_pragmas(const std::string& metal_text);

// The translation unit of a kernel. It compiles as it is; what a launch adds is in macros (see
// prelude/cuda/platform.h; ZK_RANK_n is the rank of the n-th input, where the kernel names its
// shape). The kernel function takes the inputs, the outputs, the sizes of those inputs, and what
// the geometry asks for.
//
// Errors come with the user's own lines, in the files "source" and "header".
//
// `sections` gives the prelude for the identifiers of a text.
Rewritten cuda_text(Unit&, const Library&,
                    const std::function<std::string(const std::set<std::string>&)>& sections);

}  // namespace zmlx
