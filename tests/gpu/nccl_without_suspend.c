// SPDX-License-Identifier: Apache-2.0
// Test stand-in for what NCCL has from 2.29.7 on and vLLM's wrapper (0.30 and newer) looks up when it loads: linked to
// an older libnccl it makes a library that loads there. vLLM's weight transfer calls none of the three.

enum { nccl_invalid_usage = 5 };

int ncclCommSuspend(void* comm, int flags) {
    (void)comm;
    (void)flags;
    return nccl_invalid_usage;
}

int ncclCommResume(void* comm) {
    (void)comm;
    return nccl_invalid_usage;
}

int ncclCommQueryProperties(void* comm, void* properties) {
    (void)comm;
    (void)properties;
    return nccl_invalid_usage;
}
