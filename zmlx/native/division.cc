// Integers divided by zero. A GPU goes on with a value that must not be used, and so does aarch64.
// x86-64 raises a signal that would end the process, so inside a kernel the signal is answered:
// quotient and remainder are 0, and the thread goes on behind the division.
#include "host.h"

#if defined(__x86_64__)

#include <signal.h>
#include <ucontext.h>

#include <mutex>

namespace zmlx {
namespace {

thread_local volatile int kernels_running = 0;
struct sigaction before;

bool is_prefix(uint8_t byte) {
  switch (byte) {
    case 0x26: case 0x2e: case 0x36: case 0x3e: case 0x64: case 0x65: case 0x66: case 0x67:
      return true;
    default:
      return (byte & 0xf0) == 0x40;  // REX
  }
}

// A `div` or `idiv`. One of bytes has quotient and remainder in the halves of AX, and leaves DX.
struct Division {
  size_t length;  // 0 if another instruction is there
  bool of_bytes;
};

Division division_at(const uint8_t* code) {
  const uint8_t* at = code;
  while (is_prefix(*at)) ++at;
  bool divides = (at[0] == 0xf6 || at[0] == 0xf7) && (at[1] & 0x30) == 0x30;
  if (!divides) return {};
  bool of_bytes = at[0] == 0xf6;
  int mode = at[1] >> 6, base = at[1] & 7;
  at += 2;
  if (mode == 3) return {size_t(at - code), of_bytes};
  if (base == 4) base = *at++ & 7;  // scale, index, base
  bool wide = mode == 2 || (mode == 0 && base == 5);
  return {size_t(at - code + (wide ? 4 : mode)), of_bytes};
}

void pass_on(int number, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    signal(number, SIG_DFL);  // the instruction runs again, and ends the process
  } else {
    before.sa_handler(number);
  }
}

void go_on(int number, siginfo_t* info, void* context) {
  auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  bool ours = kernels_running && info->si_code == FPE_INTDIV;
  Division division = ours ? division_at((const uint8_t*)registers[REG_RIP]) : Division{};
  if (division.length == 0) return pass_on(number, info, context);
  registers[REG_RAX] &= division.of_bytes ? ~greg_t(0xffff) : 0;
  if (!division.of_bytes) registers[REG_RDX] = 0;
  registers[REG_RIP] += division.length;
}

void install() {
  struct sigaction action = {};
  action.sa_sigaction = go_on;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGFPE, &action, &before);
}

}  // namespace

RunningKernel::RunningKernel() {
  static std::once_flag once;
  std::call_once(once, install);
  kernels_running = kernels_running + 1;
}
RunningKernel::~RunningKernel() { kernels_running = kernels_running - 1; }

}  // namespace zmlx

#else

namespace zmlx {
RunningKernel::RunningKernel() = default;
RunningKernel::~RunningKernel() = default;
}  // namespace zmlx

#endif
