// Which threads reach a collective together. CUDA's warp operations name the lanes that take part;
// Metal's mean those that are active. Where control flow depends on nothing that differs between
// the threads of a simdgroup, all of them are, and the cheap and well-defined forms apply.
#pragma once

#include "passes.h"

namespace zmlx {

// Passes every collective, as its first argument, `zk_flow<control, exits>()` with the numbers of
// `Flow` (see cuda_bodies.h). In doubt they are 2.
void mark_flow(Unit&, const Library&);

}  // namespace zmlx
