"""torch.func: gradients of each sample by vmap, a Hessian-vector product, and functional_call on an ensemble."""

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vjp, vmap

device = torch.device("cuda")
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, x, y):
    return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])


per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
models = [nn.Linear(32, 4).to(device) for _ in range(3)]
stacked, buffers = stack_module_state(models)
for _ in range(8):
    x, y = torch.randn(16, 32, device=device), torch.randint(0, 4, (16,), device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = per_sample(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.einsum("b,b...->...", scale, gradients[name]) / len(x)
    _, tangent = jvp(lambda a: model(a).sum(), (x,), (torch.ones_like(x),))
    _, pull = vjp(lambda a: model(a), x)
    pull(torch.ones(16, 4, device=device))
    outputs = vmap(lambda p, b, a: functional_call(models[0], (p, b), (a,)), in_dims=(0, 0, None))(
        stacked, buffers, x
    )
    assert outputs.shape == (3, 16, 4)
    optimizer.step()
    optimizer.zero_grad()
