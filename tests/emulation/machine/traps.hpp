// Signals of the processor as faults of the kernel: a wild pointer, a division by zero or a trap of
// the undefined-behaviour checks ends the launch with a message, not the Python process.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include "machine/machine.hpp"

namespace emulation {

class Traps {
 public:
  Traps() {
    owner = pthread_self();
    // The handler has its own stack, since the fiber's may have overflowed.
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = handle;
    // NODEFER, as the handler never returns: the launcher goes on, with signals as before.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < count; ++i) sigaction(signals[i], &action, &old_[i]);
  }

  ~Traps() {
    for (int i = 0; i < count; ++i) sigaction(signals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

  Traps(const Traps&) = delete;
  Traps& operator=(const Traps&) = delete;

 private:
  static void handle(int number, siginfo_t* info, void* context) {
    if (!pthread_equal(pthread_self(), owner)) {  // another thread of the process: not ours
      signal(number, SIG_DFL);
      return;
    }
    machine.fault_address = instruction(static_cast<ucontext_t*>(context));
    if (number == SIGFPE) fail("divides an integer by zero");
    if (number == SIGILL || number == SIGTRAP)
      fail("has undefined behaviour: a misaligned pointer, an index out of bounds, a shift too far "
           "or an integer overflow");
    fail("uses memory that is not there, at %p", info->si_addr);
  }

  static std::uintptr_t instruction(const ucontext_t* context) {
#if defined(__x86_64__)
    return static_cast<std::uintptr_t>(context->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return context->uc_mcontext.pc;
#else
    return 0;
#endif
  }

  static constexpr int count = 5;
  static constexpr int signals[count] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  alignas(16) static unsigned char handler_stack[65536];
  static pthread_t owner;
  struct sigaction old_[count];
  stack_t old_stack_;
};

alignas(16) unsigned char Traps::handler_stack[65536];
pthread_t Traps::owner;

}  // namespace emulation
