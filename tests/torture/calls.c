/* The torture's calls for Python, which loads this with ctypes. */
#include "torture.h"

long torture_work(long n) { return work(n); }
void torture_begin(void) { begin(); }
void torture_forked(void) { in_child(); }
