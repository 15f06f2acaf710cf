// section atomics; needs base; tokens atomic atomic_int atomic_uint atomic_bool atomic_ulong atomic_float atomic_thread_fence memory_order memory_order_relaxed memory_order_acquire memory_order_release memory_order_acq_rel memory_order_seq_cst
// Metal's atomics. They are real ones: several worker threads run threadgroups at the same time.
// They order other memory, too, though Metal's are relaxed: kernels count the groups that are done,
// behind a barrier of device memory. On x86-64 that costs nothing.

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};

// Holds T with its size and alignment, so that an array of T may be taken for atomics.
template <class T>
struct _atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, bool) ||
                    __is_same(T, long) || __is_same(T, ulong) || __is_same(T, float),
                "atomic<T> exists for int, uint, bool, ulong and float");
  T zk_value;
};
template <class T>
using atomic = _atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;

METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile _atomic<T>* object, memory_order) {
  T value;
  __atomic_load(&object->zk_value, &value, __ATOMIC_ACQUIRE);
  return value;
}
template <class T>
METAL_FUNC void atomic_store_explicit(volatile _atomic<T>* object, zk_same<T> value,
                                      memory_order) {
  __atomic_store(&object->zk_value, &value, __ATOMIC_RELEASE);
}
template <class T>
METAL_FUNC T atomic_exchange_explicit(volatile _atomic<T>* object, zk_same<T> value,
                                      memory_order) {
  T before;
  __atomic_exchange(&object->zk_value, &value, &before, __ATOMIC_ACQ_REL);
  return before;
}
template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* object, T* expected,
                                                      zk_same<T> value, memory_order,
                                                      memory_order) {
  return __atomic_compare_exchange(&object->zk_value, expected, &value, true, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE);
}

// Repeats until no other thread has changed the object between the load and the exchange.
#define ZK_FETCH(NAME, update)                                                                 \
  template <class T>                                                                           \
  METAL_FUNC T atomic_fetch_##NAME##_explicit(volatile _atomic<T>* object, zk_same<T> operand, \
                                              memory_order order) {                            \
    T before = atomic_load_explicit(object, order);                                            \
    while (!atomic_compare_exchange_weak_explicit(object, &before, T(update), order, order)) { \
    }                                                                                          \
    return before;                                                                             \
  }
#define ZK_FETCH_INTEGER(NAME, builtin)                                                         \
  template <class T>                                                                            \
    requires zk_is_integer<T>                                                                   \
  METAL_FUNC T atomic_fetch_##NAME##_explicit(volatile _atomic<T>* object, zk_same<T> operand,  \
                                              memory_order) {                                   \
    return builtin(&object->zk_value, operand, __ATOMIC_ACQ_REL);                               \
  }
ZK_FETCH(add, before + operand)
ZK_FETCH(sub, before - operand)
ZK_FETCH_INTEGER(add, __atomic_fetch_add)
ZK_FETCH_INTEGER(sub, __atomic_fetch_sub)
ZK_FETCH_INTEGER(and, __atomic_fetch_and)
ZK_FETCH_INTEGER(or, __atomic_fetch_or)
ZK_FETCH_INTEGER(xor, __atomic_fetch_xor)
ZK_FETCH(max, before < operand ? operand : before)
ZK_FETCH(min, operand < before ? operand : before)
#undef ZK_FETCH
#undef ZK_FETCH_INTEGER

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
