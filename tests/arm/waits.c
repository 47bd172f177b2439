// The demo, which then waits for the end of its input. An emulator has threads of its own beside the program's, so that the program does
// not wait for its recorder at the end: the recorder would find nobody to read mappings of.
#include <unistd.h>
#undef main
int demo(void);

int main(void)
{
    char byte;
    int status = demo();
    while (read(0, &byte, 1) > 0) {
    }
    return status;
}
