"""The fused loss is the plain one, and so are its gradients."""

import torch

from specserve.distill.loss import cross_entropies


def plain(places, target, head, weights, greedy_share):
    """The same in the open, with everything of the vocabulary's size kept."""
    said = torch.softmax(target @ head.t(), -1)
    best = torch.nn.functional.one_hot(said.argmax(-1), len(head))
    goal = (1 - greedy_share) * said + greedy_share * best
    logs = [torch.log_softmax(states @ head.t(), -1) for states in places]
    return torch.stack([-((goal * log).sum(-1) * weights).sum() for log in logs])


def test_losses_and_gradients_are_those_of_the_plain_formula():
    """For rows that are no multiple of what is taken at once, and weights of 0."""
    torch.manual_seed(5)
    rows, width, ids = 301, 24, 97
    head, target = torch.randn(ids, width), torch.randn(rows, width)
    weights = torch.rand(rows).masked_fill(torch.rand(rows) < 0.2, 0.0)
    mine = [torch.randn(rows, width, requires_grad=True) for _ in range(3)]
    theirs = [states.detach().clone().requires_grad_(True) for states in mine]
    shares = torch.tensor([1.0, 0.8, 0.64])

    found = cross_entropies(mine, target, head, weights, 0.5)
    expected = plain(theirs, target, head, weights, 0.5)
    (found * shares).sum().backward()
    (expected * shares).sum().backward()

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
