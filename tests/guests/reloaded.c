/* Code with one stack layout or another behind the same addresses: as large as the other, so that it is loaded to the same place. */
#include <stddef.h>
#include <string.h>

int cuMemAlloc_v2(unsigned long long *at, size_t bytes);
int cuMemFree_v2(unsigned long long at);

/* The call returns to the same offset in both: the same instructions, but for one number. */
__attribute__((noinline)) int FUNCTION(void)
{
    volatile char room[ROOM];
    unsigned long long block;
    room[0] = 1;
    int failed = cuMemAlloc_v2(&block, 4096);
    room[ROOM - 1] = room[0];
    return failed ? failed : cuMemFree_v2(block);
}
int go(void) { return FUNCTION() + 0 * (int)sizeof(char); }
