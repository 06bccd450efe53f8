// SPDX-License-Identifier: Apache-2.0
//
// Nothing: Meson precompiles joined.hpp for the target of this file.
