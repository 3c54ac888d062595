// The kernels of one code path, one per file of this folder.
#pragma once

#include "oasiskv.h"

namespace oasis::OASIS_ISA {

void paged_attention(const oasis_paged_attention_args &);
float read_slots(const oasis_read_slots_args &);

} // namespace oasis::OASIS_ISA
