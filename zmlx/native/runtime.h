// Threads of a group as fibers: the cooperative half of the CPU target. Kernel objects reach it
// through the table in `zk_launch::runtime`; the core only makes one worker per OS thread.
#pragma once

#include "prelude/abi.h"

namespace zmlx {

// The functions that cooperative kernels call.
const zk_runtime* runtime();

// Fiber stacks, scheduler state and threadgroup memory of one OS thread. Memory is reserved at the
// first cooperative launch, not here, so a worker that runs one-thread kernels only costs nothing.
// A worker may move to another OS thread between launches, never during one.
zk_worker* new_worker();
void delete_worker(zk_worker*);

}  // namespace zmlx
