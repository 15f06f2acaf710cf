// section prefetch; needs base; tokens ZMLX_PREFETCH ZMLX_PREFETCH_FAR ZMLX_PREFETCH_WALK ZMLX_PREFETCH_WALK_FAR
// ZMLX_PREFETCH(pointer): what lies there is wanted soon. A hint: any address will do.
// ZMLX_PREFETCH_FAR: wanted later, so that it comes near but not in the way of what is in use.
// ZMLX_PREFETCH_WALK, ZMLX_PREFETCH_WALK_FAR: the same of a walk from one end of a row to the other,
// or of a few side by side. A Zen 4 foresees those; where they are asked for, its folds of rows take
// a tenth longer and sums of experts' rows a fifth. A Zen 3 does not, and takes up to a quarter
// longer without. g++ 12 calls both a Zen 3, which has no vectors of 512 bits; those of a Zen 5 have
// instructions that a Zen 4 has not.
// ZMLX_PLACES_AHEAD: in how many places in turn a kernel asks. Intel's processors fetch ahead in
// several pages at a time, and two threads of a Sapphire Rapids core read some 17 GB/s in one place
// each and 24 in four. On a Zen 5 one is best: four took a tenth longer in row kernels.

#define ZMLX_PREFETCH(pointer) __builtin_prefetch(pointer)
#define ZMLX_PREFETCH_FAR(pointer) __builtin_prefetch(pointer, 0, 2)
#if defined(__znver4__) || (defined(__znver3__) && defined(__AVX512F__) && !defined(__AVXVNNI__))
#define ZMLX_PREFETCH_WALK(pointer)
#define ZMLX_PREFETCH_WALK_FAR(pointer)
#else
#define ZMLX_PREFETCH_WALK(pointer) ZMLX_PREFETCH(pointer)
#define ZMLX_PREFETCH_WALK_FAR(pointer) ZMLX_PREFETCH_FAR(pointer)
#endif
#if defined(__x86_64__) && !defined(__znver1__) && !defined(__znver2__) && \
    !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
#define ZMLX_PLACES_AHEAD 4
#else
#define ZMLX_PLACES_AHEAD 1
#endif
