/* What plugins.c loads: calls back through frames of its own. */
__attribute__((noinline)) void through(void (*back)(void *), void *argument, int depth)
{
    volatile char room[300];
    room[0] = (char)depth;
    if (depth > 0) through(back, argument, depth - 1);
    else back(argument);
    room[1] = room[0];
}
