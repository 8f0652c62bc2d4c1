"""A Jinja environment in which a template has a budget: it cannot loop for long, nor make a huge string or number.

Jinja's sandbox keeps a template from the process, not from the processor, and a conversation is rendered on the event
loop. So every turn of a loop, call, filter and piece of output is a step, and what is long costs more steps; operations
whose result could be far larger than what they are given are judged before they are done. Steps and not seconds, so that
the same conversation is always either accepted or refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

CHARS_A_STEP: Final = 64
MAX_NUMBER_BITS: Final = 4096
SPREAD: Final = 16
"""How many times `max_chars` an operation may make at most, where only a bound of its result is known beforehand."""

_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_WIDE_BRACES: Final = re.compile(r"\d{5}|:[^}]*\{")


class OverBudget(jinja2.TemplateError):
    """The template does more than it may; its message says what."""


class Budget:
    """What is left of one rendering's."""

    def __init__(self, max_steps: int, max_chars: int) -> None:
        self.max_chars = max_chars
        self._max_steps = max_steps
        self._num_left = max_steps

    def spend(self, value: Any) -> Any:
        """One step, and more for a long value, which is given back."""
        size = len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0
        if size > self.max_chars:
            raise OverBudget(f"it makes a value of more than {self.max_chars} characters")
        self._num_left -= 1 + size // CHARS_A_STEP
        if self._num_left < 0:
            raise OverBudget(f"it takes more than {self._max_steps} steps")
        return value

    def check_growth(self, name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a method or filter whose result would be far larger than what it is given."""
        size = len(subject) if isinstance(subject, str | bytes | list | tuple) else 0
        given = [*args, *kwargs.values()]
        if name in ("format", "format_map"):
            if isinstance(subject, str) and (_WIDE_BRACES.search(subject) or _WIDE_PERCENT.search(subject)):
                raise OverBudget("it formats with a width that is too large or not written out")
            return
        if name == "replace" and isinstance(subject, str) and len(args) >= 2:
            self._check_size(size + subject.count(str(args[0])) * len(str(args[1])), 1)
            return
        if name == "join" and isinstance(subject, str) and args and isinstance(args[0], list | tuple):
            self._check_size(sum([len(str(item)) + size for item in args[0]]), 1)
            return
        if name == "join" and isinstance(subject, list | tuple):
            between = len(str(given[0])) if given else 0
            self._check_size(sum([len(str(item)) + between for item in subject]), 1)
            return
        for argument in given:
            if isinstance(argument, int):
                self._check_size((size + 1) * abs(argument), SPREAD)
            elif isinstance(argument, dict):  # Of `translate`.
                self._check_size(size * max([len(str(value)) for value in argument.values()], default=0), SPREAD)

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Refuse an operation whose result would be far larger than its operands."""
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise OverBudget("it formats with a width that is too large or not written out")
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | bytes | list | tuple) and isinstance(times, int):
                    self._check_size(len(sized) * max(times, 0), 1)
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
            if bits.get(operator, 0) > MAX_NUMBER_BITS:
                raise OverBudget(f"it makes a number of more than {MAX_NUMBER_BITS} bits")

    def _check_size(self, size: int, spread: int) -> None:
        if size > self.max_chars * spread:
            raise OverBudget(f"it makes a value of more than {self.max_chars} characters")


_UNMETERED: Final = Budget(2**62, 2**20)
"""Of what Jinja computes while it compiles; what is refused there is tried again, and refused, in the rendering."""

_current: ContextVar[Budget] = ContextVar("budget", default=_UNMETERED)


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Whatever is rendered within the block is paid from `budget`."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates that pay for what they do. Add filters before it compiles, through `meter`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals.pop("lipsum", None)  # As much random text as one asks for.
        for name, function in list(self.filters.items()):
            self.filters[name] = meter(name, function)
        self.filters["_spend"] = _spend
        self.filters["_each"] = _each

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(jinja2.nodes.For)):
            loop.iter = _filtered("_each", loop.iter)
        _wrap(source)
        return super()._generate(source, *args, **kwargs)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        name, subject = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if name in ("format", "format_map"):  # Jinja's wrapper, which is a function that was given the method's look.
            method = getattr(__obj, "__wrapped__", __obj)
            subject = getattr(method, "__self__", None)
        if isinstance(subject, str | bytes | int):
            budget.check_growth(name, subject, args, kwargs)
        budget.spend(subject)
        return budget.spend(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        budget = _current.get()
        budget.check_operator(operator, left, right)
        return budget.spend(super().call_binop(context, operator, left, right))


def meter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it is given and what it makes."""
    # What Jinja hands over before the value itself.
    num_passed = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        subject, given = args[num_passed], args[num_passed + 1 :]
        budget.check_growth(name, subject, given, kwargs)
        budget.spend(subject)
        return budget.spend(function(*args, **kwargs))

    return metered


def _wrap(node: jinja2.nodes.Node) -> None:
    """Let what is printed, joined with `~`, or cut out pay for its length."""
    for name, child in list(node.iter_fields()):
        if isinstance(child, list):
            setattr(node, name, [_wrapped(each, node) for each in child])
        else:
            setattr(node, name, _wrapped(child, node))


def _wrapped(child: Any, parent: jinja2.nodes.Node) -> Any:
    if not isinstance(child, jinja2.nodes.Node):
        return child
    _wrap(child)
    is_cut = isinstance(child, jinja2.nodes.Getitem) and isinstance(child.arg, jinja2.nodes.Slice)
    is_printed = isinstance(parent, jinja2.nodes.Output) and not isinstance(child, jinja2.nodes.TemplateData)
    if isinstance(child, jinja2.nodes.Concat) or is_cut or is_printed:
        return _filtered("_spend", child)
    return child


def _filtered(name: str, node: Any) -> jinja2.nodes.Filter:
    made = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    made.environment = node.environment
    return made


def _spend(value: Any) -> Any:
    return _current.get().spend(value)


class _Each:
    """An iterable of known length whose every item is a step."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)


def _each(items: Any) -> Any:
    return _Each(items) if hasattr(items, "__len__") else _counted(items)


def _counted(items: Any) -> Iterator[Any]:
    budget = _current.get()
    for item in items:
        budget.spend(None)
        yield item
