"""Registries of what a config chooses by name: optimizers, schedules, model families, tasks.

That of data sources is in data_section.py.

An entry has a name, a config section of its own, and a function that loads the implementation: composing a config needs
the section only and never imports torch. Built-in entries are the modules of one package, each of which registers
itself when it is imported. Installed packages add entries through entry points, a user's script through
``serried.register_optimizer`` and ``serried.register_model``.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pydantic import create_model

from serried.configs.errors import UserError
from serried.configs.schema import models as families
from serried.configs.schema import tasks as task_sections
from serried.configs.schema.sections import OptimSection, ScheduleSection, Section, TaskSection
from serried.configs.similar_names import nearest

_Built = TypeVar("_Built", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One name of a registry."""

    name: str
    own: type[Section]
    """The section that it was registered with."""
    section: type[Section]
    """Section of ``RunConfig`` that holds its keys: its own and those that all entries have."""
    load: Callable[[], Any]
    """Import and return the implementation."""


@dataclass
class Registry:
    """Entries of one kind by name."""

    kind: str
    """In words, for messages."""
    group: str
    """The config group, which is also the section of ``RunConfig``."""
    entry_point_group: str
    base: type[Section] = Section
    """Keys that the sections of all entries have."""
    key: str = "name"
    """Key of the section that holds the name."""
    built_in_package: str | None = None
    """Its modules register the built-in entries. Named here, and not imported, as an entry point would be."""
    _entries: dict[str, Entry] = field(default_factory=dict)

    def register(self, name: str, section: type[Section], load: Callable[[], Any]) -> None:
        """Add an entry. Raises ``UserError`` if there is another entry of this name."""
        self._load_built_in()
        own = section
        if name in self._entries:
            raise UserError(f"{self.kind} {name} is registered twice; give one of the two another name")
        if section is Section:
            section = self.base
        elif not issubclass(section, self.base):  # the section has its own keys only: add those that all have
            section = create_model(
                section.__name__, __base__=(section, self.base), __doc__=section.__doc__, __module__=section.__module__,
                __cls_kwargs__={"use_attribute_docstrings": False},  # there is no source: it would be searched for long
            )  # fmt: skip
        self._entries[name] = Entry(name, own, section, load)

    def registering(self, name: str, section: type[Section]) -> Callable[[_Built], _Built]:
        """Return a decorator that registers what it decorates."""

        def add(built: _Built) -> _Built:
            self.register(name, section, lambda: built)
            return built

        return add

    def names(self) -> list[str]:
        """Names of all entries, of installed packages too."""
        self._load_built_in()
        return list(dict.fromkeys([*self._entries, *self._installed]))

    def entries(self) -> list[Entry]:
        """Entries that are registered, without those of packages that were not imported."""
        self._load_built_in()
        return list(self._entries.values())

    def get(self, name: str) -> Entry:
        """Entry ``name``; the package that provides it is imported if need be. Raises ``UserError`` if there is
        none."""
        self._load_built_in()
        if name not in self._entries and name in self._installed:
            self._import(self._installed[name])
        if name not in self._entries:
            near = nearest(name, self.names())
            hint = f"did you mean {self.group}={near[0]}? " if near else ""
            raise UserError(f"no {self.kind} {name!r} is registered; {hint}there are {', '.join(self.names())}")
        return self._entries[name]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in _entry_points().select(group=self.entry_point_group)}

    def _import(self, point: EntryPoint) -> None:
        try:
            point.load()
        except Exception as error:
            raise UserError(
                f"{self.kind} {point.name}: {point.value} of package {point.dist.name if point.dist else '?'} "
                f"cannot be imported: {error}"
            ) from error

    def _load_built_in(self) -> None:
        if self.built_in_package is not None:
            package, self.built_in_package = import_module(self.built_in_package), None
            names = [module.name for module in pkgutil.iter_modules(package.__path__)]
            # An optimizer's class, which needs torch, is in a module beside that of its section.
            for name in [name for name in names if name.endswith("_config")] or names:
                import_module(f"{package.__name__}.{name}")


@functools.cache
def _entry_points() -> Any:
    """Return those of all installed packages; each reading of them takes 15 ms."""
    return entry_points()


optimizers = Registry(
    "optimizer", "optim", "serried.optimizers", OptimSection, built_in_package="serried.trainer.optim.algorithms"
)
schedules = Registry(
    "schedule", "schedule", "serried.schedules", ScheduleSection, built_in_package="serried.trainer.optim.schedules"
)
models = Registry("model family", "model", "serried.models", families.ModelSection, key="family")
tasks = Registry("task", "task", "serried.tasks", TaskSection)


def _of_recipes(module: str, name: str) -> Callable[[], Any]:
    """Return a function that imports ``module`` of ``recipes/`` and returns what it calls ``name``."""
    return lambda: getattr(import_module(f"serried.recipes.{module}"), name)


models.register("llama", families.LlamaSection, _of_recipes("models.families.llama", "Llama"))
models.register("mistral", families.MistralSection, _of_recipes("models.families.llama", "Llama"))
models.register("qwen2", families.Qwen2Section, _of_recipes("models.families.llama", "Llama"))
models.register("qwen3", families.Qwen3Section, _of_recipes("models.families.llama", "Llama"))
models.register("olmo2", families.Olmo2Section, _of_recipes("models.families.olmo2", "Olmo2"))
models.register("phi3", families.Phi3Section, _of_recipes("models.families.phi3", "Phi3"))
for _family in ("gemma2", "gemma3_text"):
    models.register(_family, families.GemmaSection, _of_recipes("models.families.gemma", "Gemma"))
models.register("gpt2", families.GPT2Section, _of_recipes("models.families.gpt2", "GPT2"))
for _family in ("glm4_moe", "qwen3_moe", "mixtral"):
    models.register(_family, families.MoESection, _of_recipes("models.families.moe", "MoE"))
models.register("hf", families.HuggingFaceSection, _of_recipes("models.hugging_face.any_causal_lm", "HuggingFaceModel"))

tasks.register("causal_lm", task_sections.CausalLMSection, _of_recipes("text.causal_lm", "CausalLM"))
tasks.register("distillation", task_sections.DistillationSection, _of_recipes("text.distillation", "Distillation"))
tasks.register("reward", task_sections.RewardSection, _of_recipes("text.reward", "Reward"))
tasks.register("preference", task_sections.PreferenceSection, _of_recipes("text.preference", "Preference"))
tasks.register(
    "image_classification",
    task_sections.ImageSection,
    _of_recipes("classes.image_classification", "ImageClassification"),
)
tasks.register(
    "text_classification",
    task_sections.TextClassSection,
    _of_recipes("classes.text_classification", "TextClassification"),
)
tasks.register("masked_lm", task_sections.MaskedLMSection, _of_recipes("classes.masked_lm", "MaskedLM"))
_SERVED_AS = {"distillation": "causal_lm"}
BUILT_IN_TASKS = ("causal_lm", "preference", "distillation", "reward")
"""Those with the sections model and data."""


def task_of_model(name: str) -> Any:
    """Return the class of the task that opens a model which the task ``name`` has trained: one without a teacher."""
    return tasks.get(_SERVED_AS.get(name, name)).load()


def register_optimizer(name: str, *, section: type[Section] = OptimSection) -> Callable[[_Built], _Built]:
    """Register ``build(param_groups, section) -> torch.optim.Optimizer`` as ``optim=NAME``; a decorator.

    ``section`` declares its keys, in addition to those that all optimizers have (``lr``, ``weight_decay``, ``groups``).
    """
    return optimizers.registering(name, section)


def takes(section: OptimSection, argument: str) -> bool:
    """Return whether the optimizer asks for ``argument``: ``matrices`` or ``sums``, for which ranks exchange, or
    ``rounding``, for weights in bf16."""
    return argument in inspect.signature(optimizers.get(section.name).load()).parameters


def register_schedule(name: str, *, section: type[Section] = ScheduleSection) -> Callable[[_Built], _Built]:
    """Register ``rate(step, steps, peak, section) -> float`` as ``schedule=NAME``; a decorator.

    It is called for the steps after the warm-up, up to and including ``steps``.
    """
    return schedules.registering(name, section)


def register_model(name: str, *, section: type[Section] = families.ModelSection) -> Callable[[_Built], _Built]:
    """Register a ``ModelFamily``, or a function ``build(section, vocab_size) -> nn.Module``, as ``model.family=NAME``.

    A decorator. The module of a function maps ``tokens`` [B, S] to logits [B, S, V]. ``section`` declares its keys,
    in addition to those that all families have (``vocab_size``, ``max_sequence_length``, ...).
    """
    return models.registering(name, section)
