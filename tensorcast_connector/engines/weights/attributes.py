"""What a model's modules hold besides the values of their tensors, so that what loading changes of it can be seen and undone."""

from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Attributes:
    """What `model`'s modules, parameters and their helpers of one level (quantisation methods, ...) hold now."""

    def __init__(self, model: Any) -> None:
        self._holders = dict(holders(model))
        self._held = {
            name: {key: _copied(value) for key, value in each.items()} for name, each in self._holders.items()
        }

    def changed(self, model: Any) -> list[str]:
        """The names of what is not as it was."""
        now = dict(holders(model))
        names = sorted(set(now) ^ set(self._held))
        for name in now.keys() & self._held.keys():
            if now[name] is not self._holders[name]:
                names.append(name)
                continue
            before = self._held[name]
            for key in now[name].keys() | before.keys():
                if (
                    key not in now[name]
                    or key not in before
                    or not _same(now[name][key], before[key][0], before[key][1])
                ):
                    names.append(f"{name}.{key}".lstrip("."))
        return sorted(names)

    def restore(self) -> None:
        """Makes it as it was; what the values of tensors are is not touched."""
        for name, held in self._held.items():
            holder = self._holders[name]
            for key in [key for key in holder if key not in held]:
                del holder[key]
            for key, (value, copied) in held.items():
                if copied is not None:
                    _refill(value, copied)
                holder[key] = value


def holders(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attributes of everything that is looked at, by name: modules, their helpers of one level, parameters."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield name, vars(module)
        for key, value in list(vars(module).items()):
            helper = getattr(value, "__dict__", None)
            if (
                not isinstance(helper, dict)
                or isinstance(value, torch.nn.Module | type | torch.Tensor)
                or callable(value)
            ):
                continue
            if type(value).__module__.partition(".")[0] in ("builtins", "torch", "transformers") or id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{name}.{key}".lstrip("."), helper
    for name, parameter in model.named_parameters():
        yield f"{name}'s own", vars(parameter)


def _copied(value: Any) -> tuple[Any, Any]:
    """A value, and what it holds if it is something that is changed in place."""
    return value, value.copy() if isinstance(value, dict | list | set) else None


def _same(now: Any, before: Any, held: Any) -> bool:
    if held is not None:
        return now is before and _items(now) == _items(held)
    return now is before or (isinstance(now, _PLAIN) and type(now) is type(before) and now == before)


def _items(value: Any) -> Any:
    """What a container holds, compared by what plain things are and which objects others are."""
    if isinstance(value, dict):
        return [(key, _token(each)) for key, each in value.items()]
    if isinstance(value, set):
        return {_token(each) for each in value}
    return [_token(each) for each in value]


def _token(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _refill(value: Any, held: Any) -> None:
    if _items(value) == _items(held):
        return
    value.clear()
    if isinstance(value, list):
        value.extend(held)
    else:
        value.update(held)
