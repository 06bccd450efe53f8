// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete trainer group reads.

#include <string>
#include <string_view>
#include <vector>

#include <weightwire/concepts/trainer_group.hpp>

struct group {
#ifndef EXPECT_FAIL_1  // expect: TrainerGroup: add const members rank() and size() returning int
    int rank() const { return 0; }
#endif
    int size() const { return 1; }
#ifndef EXPECT_FAIL_2  // expect: TrainerGroup: add all_gather(std::string_view, weightwire::deadline) returning std::vector<std::string>
    std::vector<std::string> all_gather(std::string_view, weightwire::deadline) { return {}; }
#endif
#ifdef EXPECT_FAIL_3  // expect: TrainerGroup: add barrier(weightwire::deadline)
    void barrier() {}  // waits for ever
#else
    void barrier(weightwire::deadline) {}
#endif
};

static_assert(weightwire::explain_trainer_group<group>());
