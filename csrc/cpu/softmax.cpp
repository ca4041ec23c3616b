// softmax_stats, softmax_grad, softmax_grad_ on CPU. Threads share rows, so results do not depend on their number.
#include <algorithm>

#include "../common/arguments.h"
#include "dispatch.h"

namespace whale::cpu {
namespace {

int64_t rows_per_grain(int64_t num_classes) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, num_classes)); }

Tensor stats(Tensor logits, Tensor target, int64_t first_class, std::optional<Tensor> class_weight, bool smoothing) {
  check_logits(logits, target, "softmax_stats");
  const Dtype dtype = dtype_of(logits, "softmax_stats");
  const ScalarType wide = statistics_type(logits);
  const int64_t num_rows = logits.size(0), num_classes = logits.size(1);
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  target = vector_argument(target, num_rows, ScalarType::Long, logits, "softmax_stats", "target");
  class_weight = vector_argument(class_weight, num_classes, wide, logits, "softmax_stats", "class_weight");
  Tensor result = torch::stable::new_empty(logits, {4, num_rows}, wide);
  const StatsRows rows{logits.const_data_ptr(), logits.stride(0), num_rows, num_classes, first_class,
                       static_cast<const int64_t*>(target.const_data_ptr()), pointer_or_null(class_weight), smoothing,
                       result.mutable_data_ptr()};
  const auto loop = isa().softmax->stats[dtype];
  torch::stable::parallel_for(0, num_rows, rows_per_grain(num_classes),
                              [&](int64_t begin, int64_t end) { loop(rows, begin, end); });
  return result;
}

// logits and grad have dense rows and may be one tensor.
void write_grad(const Tensor& logits, const Tensor& grad, const Tensor& lse, const Tensor& target, int64_t first_class,
                const Tensor& softmax_coef, const Tensor& target_coef, const std::optional<Tensor>& smooth_coef,
                const std::optional<Tensor>& class_weight) {
  const char* op = "softmax_grad";
  const ScalarType wide = statistics_type(logits);
  const int64_t num_rows = logits.size(0), num_classes = logits.size(1);
  const Tensor targets = vector_argument(target, num_rows, ScalarType::Long, logits, op, "target");
  const Tensor lses = vector_argument(lse, num_rows, wide, logits, op, "lse");
  const Tensor softmax = vector_argument(softmax_coef, num_rows, wide, logits, op, "softmax_coef");
  const Tensor of_target = vector_argument(target_coef, num_rows, wide, logits, op, "target_coef");
  const auto smooth = vector_argument(smooth_coef, num_rows, wide, logits, op, "smooth_coef");
  const auto weight = vector_argument(class_weight, num_classes, wide, logits, op, "class_weight");
  const GradRows rows{logits.const_data_ptr(), logits.stride(0), num_classes, first_class,
                      static_cast<const int64_t*>(targets.const_data_ptr()), lses.const_data_ptr(),
                      softmax.const_data_ptr(), of_target.const_data_ptr(), pointer_or_null(smooth),
                      pointer_or_null(weight), grad.mutable_data_ptr(), grad.stride(0)};
  const auto loop = isa().softmax->grad[dtype_of(logits, op)];
  torch::stable::parallel_for(0, num_rows, rows_per_grain(num_classes),
                              [&](int64_t begin, int64_t end) { loop(rows, begin, end); });
}

Tensor grad(Tensor logits, Tensor lse, Tensor target, int64_t first_class, Tensor softmax_coef, Tensor target_coef,
            std::optional<Tensor> smooth_coef, std::optional<Tensor> class_weight) {
  check_logits(logits, target, "softmax_grad");
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  Tensor result = torch::stable::new_empty(logits, logits.sizes());
  write_grad(logits, result, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
  return result;
}

void grad_inplace(Tensor logits, Tensor lse, Tensor target, int64_t first_class, Tensor softmax_coef, Tensor target_coef,
                  std::optional<Tensor> smooth_coef, std::optional<Tensor> class_weight) {
  check_logits(logits, target, "softmax_grad_");
  if (rows_are_dense(logits)) {
    write_grad(logits, logits, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
    return;
  }
  const Tensor result = grad(logits, lse, target, first_class, softmax_coef, target_coef, smooth_coef, class_weight);
  torch::stable::copy_(logits, result);
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("softmax_stats", TORCH_BOX(&whale::cpu::stats));
  library.impl("softmax_grad", TORCH_BOX(&whale::cpu::grad));
  library.impl("softmax_grad_", TORCH_BOX(&whale::cpu::grad_inplace));
}
