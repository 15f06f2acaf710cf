"""What one thread decodes with: N floats side by side as one value, and products written with it.

On the CPU a `zmlx_floats<N>` is a vector register or a few (`native/prelude/lanes.h`), which loops
over arrays would leave to chance: g++ 12 stores their sums at every step and widens 16 bytes in ten
instructions. The header says how many lanes and sums a machine has registers for: 16 of 16 with
AVX-512, 8 of 8 elsewhere. Lane u of a step of packed values has value `place` of byte u, so that
all lanes share one shift and, since groups are whole numbers of 32 values, one scale and one bias.
A GPU compiles the same text with plain loops and does not run it.
"""

from __future__ import annotations

LANES = """\

// N floats side by side; the CPU target has them in vector registers. Products are written for
// ZMLX_LANES of them, and ZMLX_SUMS sums of so many at a time.
#ifndef ZMLX_FLOATS
#define ZMLX_LANES 16
#define ZMLX_SUMS 16

template <int N>
struct zmlx_floats {
    float x[N];
};

template <int N, typename P>
inline zmlx_floats<N> zmlx_read(P p) {
    zmlx_floats<N> lanes;
    for (int u = 0; u < N; ++u) {
        lanes.x[u] = float(p[u]);
    }
    return lanes;
}

template <int N>
inline void zmlx_write(thread float* p, zmlx_floats<N> lanes) {
    for (int u = 0; u < N; ++u) {
        p[u] = lanes.x[u];
    }
}

template <int N>
inline zmlx_floats<N> zmlx_splat(float x) {
    zmlx_floats<N> lanes;
    for (int u = 0; u < N; ++u) {
        lanes.x[u] = x;
    }
    return lanes;
}

template <int N>
inline zmlx_floats<N> zmlx_fma(zmlx_floats<N> a, zmlx_floats<N> b, zmlx_floats<N> c) {
    for (int u = 0; u < N; ++u) {
        c.x[u] = fma(a.x[u], b.x[u], c.x[u]);
    }
    return c;
}

// a[0] + a[1], a[2] + a[3], ..., and then those of b.
template <int N>
inline zmlx_floats<N> zmlx_pair_sums(zmlx_floats<N> a, zmlx_floats<N> b) {
    zmlx_floats<N> sums;
    for (int u = 0; u < N / 2; ++u) {
        sums.x[u] = a.x[2 * u] + a.x[2 * u + 1];
        sums.x[N / 2 + u] = b.x[2 * u] + b.x[2 * u + 1];
    }
    return sums;
}

// Of each of N bytes from p on: its value `place` of BITS bits, less half of 2^BITS.
template <int BITS, int N, typename P>
inline zmlx_floats<N> zmlx_codes(P p, int place) {
    zmlx_floats<N> lanes;
    for (int u = 0; u < N; ++u) {
        const int value = int(p[u]) >> BITS * place & ((1 << BITS) - 1);
        lanes.x[u] = float(value - (1 << (BITS - 1)));
    }
    return lanes;
}

// Of each of N bytes from p on: its value `place` of BITS bits, times scale, plus bias.
template <int BITS, int N, typename P>
inline zmlx_floats<N> zmlx_dequantized(P p, int place, float scale, float bias) {
    zmlx_floats<N> lanes;
    for (int u = 0; u < N; ++u) {
        lanes.x[u] = fma(float(int(p[u]) >> BITS * place & ((1 << BITS) - 1)), scale, bias);
    }
    return lanes;
}
// Before a loop of a fixed, small number of steps over lanes.
#define ZMLX_UNROLL
#define ZMLX_ROLLED
#define ZMLX_SCALAR
// Before a function that is called in several places and would be compiled in each.
#define ZMLX_APART
#endif
"""

PRODUCTS = """\

// Where rows begin: `step` apart, with the last one's place for those behind it, or in a list.
struct zmlx_strided_rows {
    size_t first;
    size_t step;
    int last;
    size_t at(int key) const {
        return first + size_t(min(key, last)) * step;
    }
};

struct zmlx_listed_rows {
    thread size_t* rows;
    size_t at(int key) const {
        return rows[key];
    }
};

inline zmlx_strided_rows zmlx_rows_from(int start, int last, size_t head, size_t step) {
    const zmlx_strided_rows rows = {head + size_t(start) * step, step, last - start};
    return rows;
}

// Rows of SIZE numbers: step e of row `key` is its values e W ... e W + W - 1. Asked for is step
// e + b. Asking for a row is asking for every `parts`-th of its lines of 64 bytes, each LINE values
// long. A row that does not begin with a line ends in one more.
template <int W, int SIZE, int LINE, typename P, typename R>
struct zmlx_numbers {
    P values;
    R rows;
    zmlx_floats<W> at(int key, int e, int b) const {
        return zmlx_read<W>(values + rows.at(key) + e * W + b * W);
    }
    void ask(int key, int part, int parts) const {
        const int lines = (SIZE + LINE - 1) / LINE + 1;
        const int each = (lines + parts - 1) / parts;
        ZMLX_UNROLL
        for (int i = 0; i < each && part * each < lines; ++i) {
            ZMLX_PREFETCH_FAR(values + rows.at(key) + min((part * each + i) * LINE, SIZE - 1));
        }
    }
};

template <int W, int SIZE, int LINE, typename P, typename R>
inline zmlx_numbers<W, SIZE, LINE, P, R> zmlx_numbers_of(P values, R rows) {
    zmlx_numbers<W, SIZE, LINE, P, R> view = {values, rows};
    return view;
}

// Rows of SIZE bytes of packed values: step e is value e % PLACES of W bytes. Asked for is the code
// of step e + b, where e is a multiple of PLACES. The line in which the next row begins is not
// asked for: codes of a head follow each other, and a request more per row takes longer than it
// saves.
template <int W, int BITS, int SIZE, typename P, typename R>
struct zmlx_coded {
    P values;
    R rows;
    P bytes(int key, int e, int b) const {
        return values + rows.at(key) + e / (8 / BITS) * W + b / (8 / BITS) * W;
    }
    zmlx_floats<W> at(int key, int e, int b) const {
        return zmlx_codes<BITS, W>(bytes(key, e, b), b % (8 / BITS));
    }
    void ask(int key, int part, int parts) const {
        const int lines = (SIZE + 63) / 64;
        const int each = (lines + parts - 1) / parts;
        ZMLX_UNROLL
        for (int i = 0; i < each && part * each < lines; ++i) {
            ZMLX_PREFETCH(values + rows.at(key) + (part * each + i) * 64);
        }
    }
};

template <int W, int BITS, int SIZE, typename P, typename R>
inline zmlx_coded<W, BITS, SIZE, P, R> zmlx_coded_of(P values, R rows) {
    zmlx_coded<W, BITS, SIZE, P, R> view = {values, rows};
    return view;
}

// The values themselves, PER steps a group, which has a scale and a bias for each of KEYS rows.
// Asked for is step e + b, where e is a multiple of PER.
template <int W, int BITS, int PER, int KEYS, typename C>
struct zmlx_decoded {
    C codes;
    thread float* scales;
    thread float* biases;
    zmlx_floats<W> at(int key, int e, int b) const {
        const int group = (e / PER + b / PER) * KEYS + key;
        return zmlx_dequantized<BITS, W>(
            codes.bytes(key, e, b), b % (8 / BITS), scales[group], biases[group]);
    }
};

template <int W, int BITS, int PER, int KEYS, typename C>
inline zmlx_decoded<W, BITS, PER, KEYS, C> zmlx_decoded_of(
    C codes, thread float* scales, thread float* biases) {
    zmlx_decoded<W, BITS, PER, KEYS, C> view = {codes, scales, biases};
    return view;
}

// How many of `steps` steps, `most` at most, have their sums for `rows` rows in registers: 2 of an
// even number at least.
constexpr int zmlx_block(int rows, int steps, int most) {
    int block = most;
    while (block > 1 && (steps % block != 0 || (block > 2 && rows * block > ZMLX_SUMS))) {
        block /= 2;
    }
    return block;
}

// folded[i] = x[2i] + x[2i + 1].
template <int N>
inline void zmlx_halve(thread float* folded, thread float* x) {
    ZMLX_ROLLED
    for (int i = 0; i < N; ++i) {
        folded[i] = x[2 * i] + x[2 * i + 1];
    }
}

// sums[i] = x[PER i] + ... + x[PER i + PER - 1] for PER of 2, 4 or 8; x is used up. For all i at
// once, since a fold of its own for each has no lanes.
template <int N, int PER>
inline void zmlx_fold(thread float* sums, thread float* x) {
    float half_[N * PER / 2];
    if (PER == 2) {
        zmlx_halve<N>(sums, x);
        return;
    }
    zmlx_halve<N * PER / 2>(half_, x);
    if (PER == 8) {
        zmlx_halve<2 * N>(x, half_);
        zmlx_halve<N>(sums, x);
    } else {
        zmlx_halve<N>(sums, half_);
    }
}

// x[u] takes x[u + N] in.
template <int N, bool LARGER>
inline void zmlx_fold_upper(thread float* x) {
    for (int u = 0; u < N; ++u) {
        x[u] = LARGER ? max(x[u], x[u + N]) : x[u] + x[u + N];
    }
}

// The sum, or the largest, of x[0] ... x[15], which are used up.
template <bool LARGER>
inline float zmlx_folded(thread float* x) {
    zmlx_fold_upper<8, LARGER>(x);
    zmlx_fold_upper<4, LARGER>(x);
    zmlx_fold_upper<2, LARGER>(x);
    zmlx_fold_upper<1, LARGER>(x);
    return x[0];
}

// The scores s[key] of a row become exp(s - top), with the peak `top` so far; `change` is what the
// earlier peak makes of sums. `total` are 16 sums of them.
template <int KEYS>
inline void zmlx_weights(
    thread float* s, thread float* top, thread float* total, thread float* change) {
    float lanes[16];
    for (int u = 0; u < 16; ++u) {
        float larger = s[u];
        for (int key = 16; key < KEYS; key += 16) {
            larger = max(larger, s[key + u]);
        }
        lanes[u] = larger;
    }
    const float most = max(*top, zmlx_folded<true>(lanes));
    const float by = exp(*top - most);
    *top = most;
    *change = by;
    for (int u = 0; u < 16; ++u) {
        lanes[u] = total[u] * by;
    }
    for (int key = 0; key < KEYS; key += 16) {
        for (int u = 0; u < 16; ++u) {
            const float p = exp(s[key + u] - most);
            s[key + u] = p;
            lanes[u] += p;
        }
    }
    for (int u = 0; u < 16; ++u) {
        total[u] = lanes[u];
    }
}

// The sums of a row for AT keys, 2 or 4, as W in all: W / AT of each, which add up to it.
template <int W, int AT>
inline zmlx_floats<W> zmlx_merged(thread zmlx_floats<W>* sums) {
    zmlx_floats<W> merged = zmlx_pair_sums<W>(sums[0], sums[1]);
    if (AT == 4) {
        merged = zmlx_pair_sums<W>(merged, zmlx_pair_sums<W>(sums[AT - 2], sums[AT - 1]));
    }
    return merged;
}

// For each row and key W / AT sums, which add up to own[row] · cache[key]. Meanwhile the rows of
// `soon` are on their way. AT keys are taken at a time, and STEP steps, which divide STEPS. If
// SCALED, what these add is times scales[e / STEP][key]: every row takes a product more for it, and
// every step of a key one less than if its values were made first.
template <
    int ROWS, int KEYS, int STEPS, int W, int AT, int STEP, bool SCALED, typename C, typename Q>
ZMLX_APART inline void zmlx_dots(
    thread float* part, thread float* own, thread float* scales, C cache, Q soon) {
    for (int key = 0; key < KEYS; key += AT) {
        zmlx_floats<W> sums[ROWS * AT];
        ZMLX_UNROLL
        for (int i = 0; i < ROWS * AT; ++i) {
            sums[i] = zmlx_splat<W>(0.0f);
        }
        ZMLX_UNROLL
        for (int k = 0; k < AT; ++k) {
            soon.ask(key + k, 0, 1);
        }
        for (int e = 0; e < STEPS; e += STEP) {
            zmlx_floats<W> added[ROWS * AT];
            ZMLX_UNROLL
            for (int i = 0; i < ROWS * AT; ++i) {
                added[i] = sums[i];
                if (SCALED) {
                    added[i] = zmlx_splat<W>(0.0f);
                }
            }
            ZMLX_UNROLL
            for (int b = 0; b < STEP; ++b) {
                zmlx_floats<W> x[AT];
                ZMLX_UNROLL
                for (int k = 0; k < AT; ++k) {
                    x[k] = cache.at(key + k, e, b);
                }
                ZMLX_UNROLL
                for (int i = 0; i < ROWS * AT; ++i) {
                    const zmlx_floats<W> q =
                        zmlx_read<W>(own + (i / AT * STEPS + e + b) * W);
                    added[i] = zmlx_fma<W>(q, x[i % AT], added[i]);
                }
            }
            ZMLX_UNROLL
            for (int i = 0; i < ROWS * AT; ++i) {
                if (SCALED) {
                    const float scale = scales[e / STEP * KEYS + key + i % AT];
                    added[i] = zmlx_fma<W>(zmlx_splat<W>(scale), added[i], sums[i]);
                }
                sums[i] = added[i];
            }
        }
        ZMLX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            zmlx_write<W>(
                part + (r * KEYS + key) * (W / AT), zmlx_merged<W, AT>(sums + r * AT));
        }
    }
}

// o[row] += Σ_key s[row][key] cache[key] in BLOCK steps from `step` on, with sums in registers.
template <int ROWS, int NEXT, int STEPS, int W, int BLOCK, typename C, typename Q>
ZMLX_APART inline void zmlx_weigh(
    thread float* o, thread float* s, int step, int count, C cache, Q soon) {
    zmlx_floats<W> sums[ROWS][BLOCK];
    ZMLX_UNROLL
    for (int r = 0; r < ROWS; ++r) {
        ZMLX_UNROLL
        for (int b = 0; b < BLOCK; ++b) {
            sums[r][b] = zmlx_read<W>(o + (r * STEPS + step + b) * W);
        }
    }
    for (int key = 0; key < count; ++key) {
        soon.ask(key, step / BLOCK, STEPS / BLOCK);
        zmlx_floats<W> x[BLOCK];
        ZMLX_UNROLL
        for (int b = 0; b < BLOCK; ++b) {
            x[b] = cache.at(key, step, b);
        }
        ZMLX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const zmlx_floats<W> p = zmlx_splat<W>(s[r * NEXT + key]);
            ZMLX_UNROLL
            for (int b = 0; b < BLOCK; ++b) {
                sums[r][b] = zmlx_fma<W>(p, x[b], sums[r][b]);
            }
        }
    }
    ZMLX_UNROLL
    for (int r = 0; r < ROWS; ++r) {
        ZMLX_UNROLL
        for (int b = 0; b < BLOCK; ++b) {
            zmlx_write<W>(o + (r * STEPS + step + b) * W, sums[r][b]);
        }
    }
}
"""
