// section failure
// ZMLX_FAIL does nothing here: see platform.h.
