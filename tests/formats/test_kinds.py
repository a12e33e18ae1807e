"""Keys of every framework, and what they hold."""

import pytest

from ckptdrill.formats.kinds import Kind, sort


@pytest.mark.parametrize(
    ("key", "kind", "name", "moment"),
    [
        ("model.layers.0.weight", Kind.WEIGHT, "layers.0.weight", ""),
        ("model.module._orig_mod.a.weight", Kind.WEIGHT, "a.weight", ""),
        ("model.model.layers.0.weight", Kind.WEIGHT, "model.layers.0.weight", ""),
        ("state_dict.l.bias", Kind.WEIGHT, "l.bias", ""),
        ("app.model.a", Kind.WEIGHT, "a", ""),
        ("layers.0.attention.wq.weight", Kind.WEIGHT, "layers.0.attention.wq.weight", ""),
        ("rank1/state.pt:model.a", Kind.WEIGHT, "a", ""),
        ("master.a.weight", Kind.MASTER, "a.weight", ""),
        ("optimizer.state.fp32_param.a.weight", Kind.MASTER, "a.weight", ""),
        ("optimizer.state.0.exp_avg", Kind.MOMENT, "0", "exp_avg"),
        ("optim.state.a.weight.exp_avg_sq", Kind.MOMENT, "a.weight", "exp_avg_sq"),
        ("optim.state.module.a.weight.exp_avg_sq", Kind.MOMENT, "a.weight", "exp_avg_sq"),
        ("optimizer_states.0.state.3.momentum_buffer", Kind.MOMENT, "3", "momentum_buffer"),
        ("optimizer.state.exp_avg.decoder.weight", Kind.MOMENT, "decoder.weight", "exp_avg"),
        ("chained_0.optimizer.state.exp_avg.a", Kind.MOMENT, "a", "exp_avg"),
        ("opt_state.0.mu.dense.kernel", Kind.MOMENT, "dense.kernel", "mu"),
        ("opt_state.1.0.nu.params.dense.kernel", Kind.MOMENT, "dense.kernel", "nu"),
        ("optimizer.state.0.step", Kind.PARAMETER_STEP, "0", "step"),
        ("opt_state.0.count", Kind.PARAMETER_STEP, "", "count"),
        ("optimizer.param_groups.0.lr", Kind.GROUPS, "param_groups.0.lr", ""),
        ("ema.a.weight", Kind.EMA, "a.weight", ""),
        ("ema_model.a.weight", Kind.EMA, "a.weight", ""),
    ],
)
def test_tensors(key: str, kind: Kind, name: str, moment: str) -> None:
    found = sort(key, weight_like=True)
    assert (found.kind, found.name, found.moment) == (kind, name, moment)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("lr_scheduler.last_epoch", Kind.SCHEDULER),
        ("lr_schedulers.0._step_count", Kind.SCHEDULER),
        ("common.opt_param_scheduler.max_lr", Kind.SCHEDULER),
        ("scaler._scale", Kind.SCALER),
        ("rng.0.cpu", Kind.RNG),
        ("rng_state/shard_0_1.torch", Kind.RNG),
        ("random_state.1", Kind.RNG),
        ("random_ltd", Kind.OTHER),
        ("global_step", Kind.STEP),
        ("train_state.step", Kind.STEP),
        ("common.iteration", Kind.STEP),
        ("dataloader.dp_rank_0", Kind.DATA),
        ("common.args.consumed_train_samples", Kind.DATA),
        ("loops.fit_loop.epoch_loop.batch_progress.total.ready", Kind.DATA),
        ("custom.0.n", Kind.OTHER),
    ],
)
def test_values(key: str, kind: Kind) -> None:
    assert sort(key, weight_like=False).kind is kind


def test_what_wrappers_added_is_recorded_and_only_that() -> None:
    wrappers = sort("model.module._orig_mod.a", weight_like=True).wrappers
    assert sorted(wrappers) == ["_orig_mod", "module"]
    inner = sort("model.encoder.module.a", weight_like=True)
    assert (inner.name, inner.wrappers) == ("encoder.module.a", ())
