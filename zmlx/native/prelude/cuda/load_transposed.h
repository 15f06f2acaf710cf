// section load_transposed
// ZMLX_LOAD_TRANSPOSED is not defined here: a kernel has loops of its own in its place.
