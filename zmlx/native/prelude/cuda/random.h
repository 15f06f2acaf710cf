// section random
// A thread draws one counter at a time, as the header has it.
