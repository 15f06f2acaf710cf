// section prefetch; needs base; tokens ZMLX_PREFETCH ZMLX_PREFETCH_FAR
// ZMLX_PREFETCH(pointer): what lies there is wanted soon. A hint: any address will do.
// ZMLX_PREFETCH_FAR: wanted later, so that it comes near but not in the way of what is in use.

#define ZMLX_PREFETCH(pointer) __builtin_prefetch(pointer)
#define ZMLX_PREFETCH_FAR(pointer) __builtin_prefetch(pointer, 0, 2)
