// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete init info reads.

#include <memory>
#include <string>

#include <weightwire/concepts/trainer_init_info.hpp>

struct my_backend {};

struct init_info {
#ifndef EXPECT_FAIL_1  // expect: TrainerInitInfo: add a member type backend naming the backend's tag
    using backend = my_backend;
#endif
#ifndef EXPECT_FAIL_2  // expect: TrainerInitInfo: add a data member int rank
    int rank = 0;
#endif
#ifndef EXPECT_FAIL_3  // expect: TrainerInitInfo: add init_message() const returning the wire parameters as JSON
    std::string init_message() const { return "{}"; }
#endif
#ifdef EXPECT_FAIL_4  // expect: TrainerInitInfo: make it copyable
    std::unique_ptr<int> owned{};
#endif
};

static_assert(weightwire::explain_trainer_init_info<init_info>());
