"""A module built on the meta device is initialised later to what direct building gives."""

import torch


def test_reset_parameters_draws_what_building_draws(tiny):
    torch.manual_seed(7)
    direct = tiny.build()
    with torch.device("meta"):
        late = tiny.build()
    assert not list(late.buffers()), "buffers would need materialising too"
    late.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.fill_(float("nan"))
    for module in late.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    # Building may draw some weights twice, and in another order: what matters is how they are spread.
    # `to_empty` unties tied weights, so both names of one count.
    drawn = dict(late.named_parameters(remove_duplicate=False))
    for name, expected in direct.named_parameters(remove_duplicate=False):
        got = drawn[name].detach()
        spread, mean = expected.detach().std(correction=0), expected.detach().mean()
        assert got.isfinite().all(), name
        assert torch.allclose(got.std(correction=0), spread, rtol=0.6, atol=1e-6), name
        assert torch.allclose(got.mean(), mean, atol=spread.item() + 1e-6), name


def test_blocks_are_of_the_announced_classes(tiny):
    with torch.device("meta"):
        model = tiny.build()
    found = {type(module) for module in model.modules() if isinstance(module, tiny.block_classes)}
    assert found == set(tiny.block_classes)
    in_blocks = {
        id(parameter)
        for block in model.modules()
        if isinstance(block, tiny.block_classes)
        for parameter in block.parameters()
    }
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in in_blocks]
    assert outside, "the root unit has parameters of its own"
    assert len(outside) < len(in_blocks)
