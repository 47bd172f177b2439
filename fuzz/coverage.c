/* What instrumented code calls, for `seeds`: it is built like the rest, and neither libFuzzer nor a sanitizer's runtime is in it. */
#include <stdint.h>
void __sanitizer_cov_8bit_counters_init(char *begin, char *end) { (void)begin, (void)end; }
void __sanitizer_cov_pcs_init(const uintptr_t *begin, const uintptr_t *end) { (void)begin, (void)end; }
#define COMPARED(bits, type)                                                                      \
    void __sanitizer_cov_trace_cmp##bits(type one, type other) { (void)one, (void)other; }        \
    void __sanitizer_cov_trace_const_cmp##bits(type one, type other) { (void)one, (void)other; }
COMPARED(1, uint8_t)
COMPARED(2, uint16_t)
COMPARED(4, uint32_t)
COMPARED(8, uint64_t)
void __sanitizer_cov_trace_pc_indir(uintptr_t callee) { (void)callee; }
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t *cases) { (void)value, (void)cases; }
