// section prefetch
// ZMLX_PREFETCH does nothing here: see platform.h.
