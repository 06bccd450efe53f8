// SPDX-License-Identifier: Apache-2.0
//
// A process that is linked to one libnccl and opens another by path.
// usage: test_nccl_linked PATH; prints the linked version, the opened one and the opened file.

#include <cstdio>

#include <weightwire/core/error.hpp>
#include <weightwire/nccl_api/library.hpp>

int main(int count, char** words) {
    int linked = 0;
    if (count != 2 || ncclGetVersion(&linked) != ncclSuccess) {
        return 2;
    }
    try {
        const auto opened = weightwire::nccl_api::library::open(words[1]);
        int again = 0;
        if (ncclGetVersion(&again) != ncclSuccess || again != linked) {
            return 3;
        }
        std::printf("%d %d %s\n", linked, opened.version(), opened.path().c_str());
    } catch (const weightwire::error& failed) {
        std::fprintf(stderr, "%s\n", failed.what());
        return 1;
    }
    return 0;
}
