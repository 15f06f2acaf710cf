// section lanes
// ZMLX_FLOATS is not defined here: a kernel has loops of its own in its place.
