/* The question with which libcudart establishes the validity of the driver it found (cudaErrorSoftwareValidityNotEstablished). */
#ifndef FAKE_CUDA_VALIDITY_H
#define FAKE_CUDA_VALIDITY_H

struct validity_question {
    unsigned driver_version, runtime_version, process, thread;
    const void *runtime_table, *validity_table, *function;
    unsigned long long seconds;
};

/* Fills in process and thread, and writes the 16 bytes that libcudart expects. */
void validity_answer(struct validity_question *question, int devices, unsigned long long out[2]);

#endif
