// The loops of the best instruction set that this machine has, chosen once, when the library is loaded.
#pragma once

#include "loops.h"

namespace whale::cpu {

struct Isa {
  const char* name;
  const BucketLoops* bucket;
  const SoftmaxLoops* softmax;
  const RoutingLoops* routing;
  const PermutationLoops* permutation;
  const ActivationLoops* activation;
  Crc32c crc32c;
};

const Isa& isa();

}  // namespace whale::cpu
