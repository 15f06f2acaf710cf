"""The Metal text of a sorting network, by which a thread finds the largest keys of several rows.

A row's keys are dealt to columns of DEPTH ≥ k keys. All columns are sorted at once (Batcher 1968,
doi:10.1145/1468075.1468121), then halved in number until a row has one: of two sorted columns, the
larger of a[p] and b[DEPTH - 1 - p] are the DEPTH largest, and bitonic, which half a merge sorts.
Every comparison is that of whole vectors of columns, and none is a branch.
"""

from __future__ import annotations

from collections.abc import Iterator

#: More are chosen one after the other.
MOST = 16


def depth_for(count: int) -> int:
    """Keys of a column, so that the `count` largest of a row can be found."""
    return 1 << (count - 1).bit_length()


def _sort(depth: int) -> Iterator[tuple[int, int]]:
    """Pairs whose larger key moves to the first place, in order: Batcher's odd-even merge sort."""
    run = 1
    while run < depth:
        step = run
        while step:
            for first in range(step % run, depth - step, 2 * step):
                for i in range(first, first + min(step, depth - first - step)):
                    if i // (2 * run) == (i + step) // (2 * run):
                        yield i, i + step
            step //= 2
        run *= 2


def _merge(depth: int) -> Iterator[tuple[int, int]]:
    """The same for keys that are bitonic."""
    step = depth // 2
    while step:
        yield from ((i, i + step) for i in range(depth) if not i & step)
        step //= 2


def header(depth: int) -> str:
    """zmlx_columns_sort, _merge and _fold over arrays of DEPTH rows of WIDTH keys each."""

    def lines(text: str) -> str:
        return "\n".join("        " + text.format(p=p, q=depth - 1 - p) for p in range(depth))

    def exchanges(pairs: Iterator[tuple[int, int]]) -> str:
        return "\n".join(f"        zmlx_exchange(a{i}, a{j});" for i, j in pairs)

    parts = {
        "LOAD": lines("uint a{p} = keys[{p} * COUNT + i];"),
        "SORT": exchanges(_sort(depth)),
        "LARGER": lines("a{p} = max(a{p}, best[{q} * WIDTH + i]);"),
        "PAIR": lines("uint a{p} = max(keys[{p} * FROM + 2 * i], keys[{q} * FROM + 2 * i + 1]);"),
        "CLEAN": exchanges(_merge(depth)),
        "STORE": lines("best[{p} * WIDTH + i] = a{p};"),
    }
    text = _HEADER
    for name, part in parts.items():
        text = text.replace(f"@{name}@\n", part + "\n" if part else "")
    return text


_HEADER = """\
inline void zmlx_exchange(thread uint& a, thread uint& b) {
    const uint less = min(a, b);
    a = max(a, b);
    b = less;
}

// Sorts COUNT columns, whose keys are COUNT apart, into best, where they are WIDTH apart.
template <int WIDTH, int COUNT>
inline void zmlx_columns_sort(const thread uint* keys, thread uint* best) {
    for (int i = 0; i < COUNT; ++i) {
@LOAD@
@SORT@
@STORE@
    }
}

// The largest of the columns of keys, which are in any order, and of best, which are sorted.
template <int WIDTH, int COUNT>
inline void zmlx_columns_merge(const thread uint* keys, thread uint* best) {
    for (int i = 0; i < COUNT; ++i) {
@LOAD@
@SORT@
@LARGER@
@CLEAN@
@STORE@
    }
}

// The largest of every two neighbours of twice COUNT sorted columns, whose keys are FROM apart.
template <int FROM, int WIDTH, int COUNT>
inline void zmlx_columns_fold(const thread uint* keys, thread uint* best) {
    for (int i = 0; i < COUNT; ++i) {
@PAIR@
@CLEAN@
@STORE@
    }
}
"""

#: From `rank` of ROWS rows to the places `chosen` and the ranks `held`, by keys of 32 bits: the
#: upper bits of the rank, then the place. Where ranks differ in no more than their lower bits, keys
#: may be in the wrong order: the text after it has to check.
BODY = """\
    // The columns that a row has left when all rows are taken together.
    constexpr int LEFT = SPAN == 16 ? 4 : SPAN;
    constexpr int HALF = SPAN > 1 ? SPAN / 2 : 1;
    constexpr int WIDTH = ROWS * LEFT;
    uint best[DEPTH * WIDTH];
    if (SPAN == 16) {
        // A row's columns are a vector; those of a few rows stay in the fastest cache.
        constexpr int FEW = ROWS % 4 == 0 ? 4 : 1;
        for (int first_of_few = 0; first_of_few < ROWS; first_of_few += FEW) {
            uint columns[DEPTH * FEW * SPAN];
            for (int r = 0; r < FEW; ++r) {
                const int row = first_of_few + r;
                if (FLAT && full) {
                    for (int i = 0; i < E; i += 64 / int(sizeof(T))) {
                        ZMLX_PREFETCH_FAR(logits + size_t(first + row) * E + beyond + i);
                    }
                }
                uint keys[SLOTS];
                if (direct) {
                    auto x = logits + size_t(first + row) * E;
                    for (int i = 0; i < SLOTS; ++i) {
                        keys[i] = zmlx_order(x[i]) | uint(PLACES - i);
                    }
                } else {
                    for (int i = 0; i < SLOTS; ++i) {
                        keys[i] = (rank[row * SLOTS + i] & ~uint(PLACES)) | uint(PLACES - i);
                    }
                }
                zmlx_columns_sort<FEW * SPAN, SPAN>(keys, columns + r * SPAN);
                for (int turn = 1; turn < TURNS; ++turn) {
                    zmlx_columns_merge<FEW * SPAN, SPAN>(
                        keys + turn * DEPTH * SPAN, columns + r * SPAN);
                }
            }
            uint halved[DEPTH * FEW * HALF];
            zmlx_columns_fold<FEW * SPAN, FEW * HALF, FEW * HALF>(columns, halved);
            zmlx_columns_fold<FEW * HALF, WIDTH, FEW * LEFT>(halved, best + first_of_few * LEFT);
        }
    } else {
        uint keys[TURNS * DEPTH * WIDTH];
        for (int j = 0; j < TURNS * DEPTH; ++j) {
            for (int r = 0; r < ROWS; ++r) {
                for (int u = 0; u < SPAN; ++u) {
                    const int i = j * SPAN + u;
                    keys[j * WIDTH + r * SPAN + u] =
                        (rank[r * SLOTS + i] & ~uint(PLACES)) | uint(PLACES - i);
                }
            }
        }
        zmlx_columns_sort<WIDTH, WIDTH>(keys, best);
        for (int turn = 1; turn < TURNS; ++turn) {
            zmlx_columns_merge<WIDTH, WIDTH>(keys + turn * DEPTH * WIDTH, best);
        }
    }
    if (SPAN > 1) {
        uint halved[DEPTH * 2 * ROWS];
        zmlx_columns_fold<WIDTH, 2 * ROWS, 2 * ROWS>(best, halved);
        zmlx_columns_fold<2 * ROWS, WIDTH, ROWS>(halved, best);
    }
    for (int k = 0; k < K; ++k) {
        for (int r = 0; r < ROWS; ++r) {
            held[k * ROWS + r] = best[k * WIDTH + r];
        }
    }
    for (int c = 0; c < K * ROWS; ++c) {
        const uint key = held[c];
        const int place = PLACES - int(key & uint(PLACES));
        chosen[c] = place;
        held[c] = SHORT ? key & ~uint(PLACES) : rank[c % ROWS * SLOTS + place];
    }
"""
