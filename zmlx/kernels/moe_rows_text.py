"""The Metal text of `moe_dispatch` and `moe_combine`."""

#: What the bodies use beside `msl`'s functions.
HEADER = """\
// ZMLX_PREFETCH asks for what is wanted soon, ZMLX_PREFETCH_WALK for what a walk comes to; the CPU
// target defines them.
#ifndef ZMLX_PREFETCH
#define ZMLX_PREFETCH(pointer)
#endif
#ifndef ZMLX_PREFETCH_WALK
#define ZMLX_PREFETCH_WALK(pointer)
#endif
"""

#: V consecutive elements of a row per thread, LINE at a time. `D_` is a copy, since for the
#: compiler a store may change D. g++ 12 copies several T of 16 bits at once only by way of a
#: variable.
SPREAD = """\
    const size_t first = size_t(thread_position_in_grid.x) * V;
    const size_t row = thread_position_in_grid.y;
    const size_t D_ = D;
    const size_t stop = min(first + V, D_);
    const int64_t slots = int64_t(tokens) * K;
    const int64_t slot = int64_t(order[row]);
    const bool valid = slot >= 0 && slot < slots;
    if (!valid && first == 0) {
        ZMLX_FAIL("order", slot);
    }
    auto from = x + (valid ? size_t(slot / K) : size_t(0)) * D_;
    auto to = y + row * D_;
    const float w = valid ? float(@WEIGHT@) : NAN;
    // Rows of x lie anywhere: while one is read, the next is on its way, and the place it goes to.
    const int64_t next = int64_t(order[min(row + 1, size_t(slots - 1))]);
    auto soon = x + (next >= 0 && next < slots ? size_t(next / K) : size_t(0)) * D_;
    size_t j = first;
    if (@COPY@) {
        for (; j + LINE <= stop; j += LINE) {
            ZMLX_PREFETCH_WALK(soon + j);
            ZMLX_PREFETCH_WALK(to + D_ + j);
            for (size_t u = 0; u < LINE; ++u) {
                const T value = from[j + u];
                to[j + u] = value;
            }
        }
        for (; j < stop; ++j) {
            to[j] = from[j];
        }
    } else {
        for (; j + LINE <= stop; j += LINE) {
            ZMLX_PREFETCH_WALK(soon + j);
            ZMLX_PREFETCH_WALK(to + D_ + j);
            for (size_t u = 0; u < LINE; ++u) {
                to[j + u] = T(w * float(from[j + u]));
            }
        }
        for (; j < stop; ++j) {
            to[j] = T(w * float(from[j]));
        }
    }
"""

#: U columns of the sum are taken through all rows in registers.
GATHER = """\
    const size_t first = size_t(thread_position_in_grid.x) * V;
    const size_t token = thread_position_in_grid.y;
    const size_t D_ = D;
    for (size_t start = first; start < min(first + V, D_); start += U) {
        auto to = y + token * D_ + start;
        if (start + U <= D_) {
            float sum[U] = {0};
            for (uint a = 0; a < K; ++a) {
                @ROW@
                // Rows lie anywhere, so that each is asked for while its columns before are summed.
                for (uint u = 0; u < U; u += 64 / sizeof(T)) {
                    ZMLX_PREFETCH_WALK(from + 1024 / sizeof(T) + u);
                }
                for (uint u = 0; u < U; ++u) {
                    sum[u] += w * float(from[u]);
                }
            }
            for (uint u = 0; u < U; ++u) {
                to[u] = T(sum[u]);
            }
        } else {
            for (uint u = 0; u < D_ - start; ++u) {
                float sum = 0.0f;
                for (uint a = 0; a < K; ++a) {
                    @ROW@
                    sum += w * float(from[u]);
                }
                to[u] = T(sum);
            }
        }
    }
""".replace(
    "@ROW@",
    """\
const int64_t row = int64_t(positions[token * K + a]);
                const bool valid = row >= 0 && row < int64_t(rows);
                if (!valid && start == 0) {
                    ZMLX_FAIL("positions", row);
                }
                auto from = x + (valid ? size_t(row) : size_t(0)) * D_ + start;
                const float w = valid ? float(@WEIGHT@) : NAN;""",
)

#: A group of TPR threads per slot.
DOT = """\
    threadgroup float scratch[(TPR + 31) / 32];
    const uint lane = thread_position_in_threadgroup.x;
    const size_t slot = threadgroup_position_in_grid.x
        + size_t(threadgroup_position_in_grid.y) * threadgroups_per_grid.x;
    if (slot >= size_t(tokens) * K) {
        return;
    }
    const size_t D_ = D;
    const int64_t row = int64_t(positions[slot]);
    const bool valid = row >= 0 && row < int64_t(rows);
    auto a = x + (valid ? size_t(row) : size_t(0)) * D_;
    auto b = dy + slot / K * D_;
    float sum[U] = {0};
    const size_t whole = D_ / U * U;
    for (size_t j = lane * U; j < whole; j += TPR * U) {
        for (uint u = 0; u < U; ++u) {
            sum[u] += float(a[j + u]) * float(b[j + u]);
        }
    }
    for (size_t j = whole + lane; j < D_; j += TPR) {
        sum[0] += float(a[j]) * float(b[j]);
    }
    for (uint w = U / 2; w > 0; w /= 2) {
        for (uint u = 0; u < w; ++u) {
            sum[u] += sum[u + w];
        }
    }
    const float total = zmlx_row_reduce<TPR, zmlx_sum>(sum[0], scratch, lane);
    if (lane == 0) {
        dw[slot] = T(valid ? total : NAN);
    }
"""
