// section prefetch; needs base; tokens ZMLX_PREFETCH
// ZMLX_PREFETCH(pointer): what lies there is wanted soon. A hint: any address will do.

#define ZMLX_PREFETCH(pointer) __builtin_prefetch(pointer)
