// SPDX-License-Identifier: Apache-2.0
// What the author of an incomplete weight source reads.

#include <vector>

#include <weightwire/concepts/weight_source.hpp>

struct source {
#ifndef EXPECT_FAIL_1  // expect: WeightSource: add metadata() returning a range of weightwire::param_meta in sending order
    std::vector<weightwire::param_meta> metadata() const { return {}; }
#endif
#ifndef EXPECT_FAIL_2  // expect: WeightSource: add weights() returning a fresh input range of weightwire::named_tensor
    std::vector<weightwire::named_tensor> weights() { return {}; }
#endif
};

static_assert(weightwire::explain_weight_source<source>());

// A range of something else is no metadata.
struct names_only {
#ifdef EXPECT_FAIL_3  // expect: WeightSource: add metadata() returning a range of weightwire::param_meta in sending order
    std::vector<int> metadata() const { return {}; }
#else
    std::vector<weightwire::param_meta> metadata() const { return {}; }
#endif
    std::vector<weightwire::named_tensor> weights() { return {}; }
};

static_assert(weightwire::explain_weight_source<names_only>());
