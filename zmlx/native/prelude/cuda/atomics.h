// section atomics; needs base; tokens atomic atomic_int atomic_uint atomic_bool atomic_ulong atomic_float atomic_thread_fence memory_order memory_order_relaxed memory_order_acquire memory_order_release memory_order_acq_rel memory_order_seq_cst
// Metal's atomics, all of them relaxed.

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};

// CUDA's type for the atomics on T; a bool is one byte of a word.
template <class T>
struct zk_atomic_type {
  static_assert(sizeof(T) == 0, "atomic<T> exists for int, uint, bool, ulong and float");
};
#define ZK_ATOMIC_TYPE(T, native, bits) \
  template <>                           \
  struct zk_atomic_type<T> {            \
    using type = native;                \
    using word = bits;                  \
  };
ZK_ATOMIC_TYPE(bool, unsigned, unsigned)
ZK_ATOMIC_TYPE(int, int, unsigned)
ZK_ATOMIC_TYPE(uint, unsigned, unsigned)
ZK_ATOMIC_TYPE(float, float, unsigned)
ZK_ATOMIC_TYPE(long, long long, unsigned long long)
ZK_ATOMIC_TYPE(ulong, unsigned long long, unsigned long long)
#undef ZK_ATOMIC_TYPE

// Holds T with its size and alignment, so that an array of T may be taken for atomics.
template <class T>
struct _atomic {
  using zk_type = typename zk_atomic_type<T>::type;
  using zk_word = typename zk_atomic_type<T>::word;
  T zk_value;
};
template <class T>
using atomic = _atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;

METAL_FUNC void atomic_thread_fence(mem_flags, memory_order,
                                    thread_scope scope = thread_scope_device) {
  if (scope == thread_scope_device) {
    zk_intrinsic_fence_device();
  } else {
    zk_intrinsic_fence_group();
  }
}

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile _atomic<T>* object, memory_order) {
  return *(const volatile T*)object;
}
template <class T>
METAL_FUNC void atomic_store_explicit(volatile _atomic<T>* object, zk_same<T> value,
                                      memory_order) {
  *(volatile T*)object = value;
}

// Stores `value` where the object holds the bits of `expected`; tells whether, and what it held.
template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* object, T* expected,
                                                      zk_same<T> value, memory_order,
                                                      memory_order) {
  using Word = typename _atomic<T>::zk_word;
  if constexpr (sizeof(T) == sizeof(Word)) {
    Word wanted = as_type<Word>(*expected);
    Word held = atomicCAS((Word*)object, wanted, as_type<Word>(T(value)));
    *expected = as_type<T>(held);
    return held == wanted;
  } else {
    unsigned shift = 8 * unsigned((unsigned long)object & 3);
    unsigned* word = (unsigned*)((unsigned long)object & ~3ul);
    unsigned seen = *(volatile unsigned*)word;
    bool held = seen >> shift & 1;
    unsigned wanted = (seen & ~(0xffu << shift)) | unsigned(value) << shift;
    bool stored = held == *expected && atomicCAS(word, seen, wanted) == seen;
    *expected = held;
    return stored;
  }
}

// `native` where CUDA has it for T, else an exchange repeated until nobody came in between.
#define ZK_FETCH(NAME, update, exists, native)                                                   \
  template <class T>                                                                             \
  METAL_FUNC T NAME(volatile _atomic<T>* object, zk_same<T> operand, memory_order order) {       \
    using Type = typename _atomic<T>::zk_type;                                                   \
    using Word = typename _atomic<T>::zk_word;                                                   \
    if constexpr (exists) {                                                                      \
      return T(native);                                                                          \
    } else {                                                                                     \
      T before = atomic_load_explicit(object, order);                                            \
      while (!atomic_compare_exchange_weak_explicit(object, &before, T(update), order, order)) { \
      }                                                                                          \
      return before;                                                                             \
    }                                                                                            \
  }
#define ZK_WHOLE (!__is_same(T, float) && !__is_same(T, bool))
ZK_FETCH(atomic_exchange_explicit, operand, !__is_same(T, bool),
         as_type<T>(atomicExch((Word*)object, as_type<Word>(T(operand)))))
ZK_FETCH(atomic_fetch_and_explicit, before & operand, ZK_WHOLE,
         atomicAnd((Word*)object, Word(operand)))
ZK_FETCH(atomic_fetch_or_explicit, before | operand, ZK_WHOLE,
         atomicOr((Word*)object, Word(operand)))
ZK_FETCH(atomic_fetch_xor_explicit, before ^ operand, ZK_WHOLE,
         atomicXor((Word*)object, Word(operand)))
ZK_FETCH(atomic_fetch_min_explicit, operand < before ? operand : before, ZK_WHOLE,
         atomicMin((Type*)object, Type(operand)))
ZK_FETCH(atomic_fetch_max_explicit, before < operand ? operand : before, ZK_WHOLE,
         atomicMax((Type*)object, Type(operand)))
// Integers wrap around, so that one addition serves both signs.
ZK_FETCH(zk_fetch_add_whole, before + operand, ZK_WHOLE, atomicAdd((Word*)object, Word(operand)))
#undef ZK_WHOLE
#undef ZK_FETCH

template <class T>
METAL_FUNC T atomic_fetch_add_explicit(volatile _atomic<T>* object, zk_same<T> operand,
                                       memory_order order) {
  if constexpr (__is_same(T, float)) {
    return atomicAdd((float*)object, operand);
  } else {
    return zk_fetch_add_whole(object, operand, order);
  }
}
template <class T>
METAL_FUNC T atomic_fetch_sub_explicit(volatile _atomic<T>* object, zk_same<T> operand,
                                       memory_order order) {
  return atomic_fetch_add_explicit(object, T(-operand), order);
}

// The forms without a result, which Metal has for 64 bits.
template <class T>
METAL_FUNC void atomic_max_explicit(volatile _atomic<T>* object, zk_same<T> operand,
                                    memory_order order) {
  atomic_fetch_max_explicit(object, operand, order);
}
template <class T>
METAL_FUNC void atomic_min_explicit(volatile _atomic<T>* object, zk_same<T> operand,
                                    memory_order order) {
  atomic_fetch_min_explicit(object, operand, order);
}

}  // namespace metal
