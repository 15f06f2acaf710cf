// section failure; needs base abi; tokens ZMLX_FAIL
// ZMLX_FAIL("targets", value): the kernel met a value that it cannot use and goes on; the core
// raises an error once the launch is over.

#define ZK_FAILURE 1

// Set by the driver for each launch; a worker thread runs one launch at a time.
static thread_local zk_failure* zk_failing;

// Writes "'targets' must be in range but got -5." The first failure of a launch wins.
__attribute__((cold, noinline)) static void zk_fail(const char* argument, long long value) {
  int none = 0;
  zk_failure* failure = zk_failing;
  if (!__atomic_compare_exchange_n(&failure->set, &none, 1, false, __ATOMIC_ACQUIRE,
                                   __ATOMIC_RELAXED)) {
    return;
  }
  char* out = failure->text;
  char* last = out + sizeof(failure->text) - 1;
  auto put = [&](const char* text) {
    while (*text && out < last) *out++ = *text++;
  };
  put("'");
  put(argument);
  put("' must be in range but got ");
  char digits[24];
  char* digit = digits + sizeof(digits) - 1;
  *digit = 0;
  unsigned long long rest = value < 0 ? 0 - (unsigned long long)value : (unsigned long long)value;
  do {
    *--digit = char('0' + rest % 10);
    rest /= 10;
  } while (rest);
  if (value < 0) *--digit = '-';
  put(digit);
  put(".");
  *out = 0;
  __atomic_store_n(&failure->set, 2, __ATOMIC_RELEASE);
}
#define ZMLX_FAIL(argument, value) zk_fail(argument, (long long)(value))
