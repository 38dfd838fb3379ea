"""The train step, and steps for evaluation and forward-only calls.

    step = make_step(functools.partial(next_token_loss, config=config), adamw(3e-4), clip=1.0)
    state = init_state(params, optimizer)
    state, metrics = step(state, batch)

A train step sums gradients over microbatches, divides once by the global count and updates once. Its two halves are
also public: `train.gradients.gradient_sums` and `train.update.update`.

make         `make_step`                          graph        the same as one compiled graph
many         k steps in one call                  pure         `pure_step`, for torch.func
evaluation   `make_eval_step`, `make_forward_only`
"""

from .evaluation import make_eval_step as make_eval_step
from .evaluation import make_forward_only as make_forward_only
from .make import make_step as make_step
from .pure import pure_step as pure_step
