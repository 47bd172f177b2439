/* A library with 200 bytes of static thread-local storage. */
static __thread char room[200] __attribute__((tls_model("initial-exec")));
char *tls_room(void) { return room; }
