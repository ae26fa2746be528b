// Switching between the stacks of the emulated threads.
//
// swapcontext makes a system call (it saves the signal mask) and a matrix kernel switches a few
// hundred thousand times, so on x86-64 a switch is a dozen instructions: what a function must
// preserve for its caller goes onto the stack, the stack pointer is exchanged, the other stack's
// values come back.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulation {

#if defined(__x86_64__) && !defined(LA_EMULATION_UCONTEXT)

struct Context { void* stack_pointer; };

extern "C" void la_emulation_switch(void** from, void* to);

// The jump at the end is not a `ret`: the processor predicts returns from a stack of their calls,
// which a switch makes wrong every time; an indirect jump is predicted from history.
asm(R"(
  .text
  .local la_emulation_switch
  .type la_emulation_switch, @function
la_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
  .size la_emulation_switch, .-la_emulation_switch
)");

inline void switch_context(Context& from, const Context& to) {
  la_emulation_switch(&from.stack_pointer, to.stack_pointer);
}

// `entry` must not return. It finds the stack as a call would have left it: 8 modulo 16.
inline void make_context(Context& context, unsigned char* stack, std::size_t bytes,
                         void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15};
  auto* slot = reinterpret_cast<void**>(top) - 1;
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  context.stack_pointer = slot;
}

#else  // any other processor: ten times slower, and portable

}  // namespace emulation
#include <ucontext.h>
namespace emulation {

struct Context {
  ucontext_t saved;
};

inline void switch_context(Context& from, const Context& to) {
  swapcontext(&from.saved, &to.saved);
}

inline void make_context(Context& context, unsigned char* stack, std::size_t bytes,
                         void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

#endif

}  // namespace emulation
