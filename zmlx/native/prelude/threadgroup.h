// section threadgroup; needs fiber
// Threadgroup variables. A declaration's type may depend on template arguments, so its size is
// known only once the kernel is instantiated; it notes its size when the object is loaded.

static unsigned zk_bytes[ZK_DECLARATIONS];

template <class Declared, int number>
struct zk_declaration {
  static unsigned note() { return zk_bytes[number] = sizeof(Declared); }
  static const unsigned bytes;
};
template <class Declared, int number>
const unsigned zk_declaration<Declared, number>::bytes = note();

template <class Declared, int number>
inline Declared& zk_threadgroup(char* const* memory) {
  (void)&zk_declaration<Declared, number>::bytes;
  return *(Declared*)memory[number];
}
