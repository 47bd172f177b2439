//! A program that never touches CUDA.
//# Link: none
#include <stdio.h>

int main(void)
{
    puts("no CUDA here");
    return 0;
}
