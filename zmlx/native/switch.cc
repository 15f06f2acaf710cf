// Switching stacks. An entry saves the registers that the platform's calling convention preserves,
// asks a C++ function (scheduler.cc) which stack to go on with, and restores that one's. Only an
// out-of-line function lets the convention decide which registers are at stake: inline assembly
// with a clobber list misses those of extensions it does not name. The floating-point control
// registers are the same for all fibers of an OS thread.
//
// On x86-64 the way back is a jump: fibers return to where they stopped, not to where the latest
// call came from, so a `ret` would be mispredicted nearly every time.
#include "scheduler.h"

#if defined(__APPLE__)
#define ZK_SYMBOL(name) "_" #name
#define ZK_HIDDEN(name) ".private_extern _" #name "\n"
#else
#define ZK_SYMBOL(name) #name
#define ZK_HIDDEN(name) ".hidden " #name "\n"
#endif

#define ZK_LABEL(name) \
  ".text\n.p2align 4\n.globl " ZK_SYMBOL(name) "\n" ZK_HIDDEN(name) ZK_SYMBOL(name) ":\n"

#if defined(__x86_64__)
#define ZK_SWITCH(entry, decide)                                                                  \
  asm(ZK_LABEL(entry)                                                                             \
      "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"                        \
      "sub $8, %rsp\nmov %rsp, %rcx\n"                                                            \
      "call " ZK_SYMBOL(decide) "\n"                                                              \
      "mov %rax, %rsp\nadd $8, %rsp\n"                                                            \
      "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\npop %rcx\njmp *%rcx\n");
asm(ZK_LABEL(zk_fiber_start)
    "mov %r12, %rdi\ncall " ZK_SYMBOL(zk_fiber_main) "\nud2\n");
#elif defined(__aarch64__)
#define ZK_SWITCH(entry, decide)                                                                  \
  asm(ZK_LABEL(entry)                                                                             \
      "stp x29, x30, [sp, #-160]!\nstp x19, x20, [sp, #16]\n"                                     \
      "stp x21, x22, [sp, #32]\nstp x23, x24, [sp, #48]\n"                                        \
      "stp x25, x26, [sp, #64]\nstp x27, x28, [sp, #80]\n"                                        \
      "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"                                         \
      "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"                                      \
      "mov x3, sp\nbl " ZK_SYMBOL(decide) "\nmov sp, x0\n"                                        \
      "ldp x19, x20, [sp, #16]\nldp x21, x22, [sp, #32]\n"                                        \
      "ldp x23, x24, [sp, #48]\nldp x25, x26, [sp, #64]\n"                                        \
      "ldp x27, x28, [sp, #80]\nldp d8, d9, [sp, #96]\n"                                          \
      "ldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"                                      \
      "ldp d14, d15, [sp, #144]\nldp x29, x30, [sp], #160\nret\n");
asm(ZK_LABEL(zk_fiber_start)
    "mov x0, x19\nbl " ZK_SYMBOL(zk_fiber_main) "\nbrk #0\n");
#else
#error "zmlx runs cooperative kernels on x86-64 and aarch64 only"
#endif

ZK_SWITCH(zk_fiber_enter, zk_decide_enter)
ZK_SWITCH(zk_fiber_meet, zk_decide_meet)
ZK_SWITCH(zk_fiber_barrier, zk_decide_barrier)
ZK_SWITCH(zk_fiber_finish, zk_decide_finish)
ZK_SWITCH(zk_fiber_overflow, zk_decide_overflow)
