"""Caches of work that tests need not repeat: Megatron's sources and imported modules do not change while they run."""

import gc


def parse_sources_once() -> None:
    """Cache what Megatron parses from its classes' sources for --help texts, each time it creates a parser."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read, known = ArgumentGroupFactory._get_field_docstrings, dict[type, dict[str, str]]()

    def docstrings(self: ArgumentGroupFactory, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(self, source)
        return known[source]

    ArgumentGroupFactory._get_field_docstrings = docstrings


def shorten_mock_data() -> None:
    """Shrink --mock-data to 1,000 sequences: building Megatron's index of 100,000 takes a third of a one-step run."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1_000


def collect_new_objects_alone() -> None:
    """Exclude the half million objects of modules and tests from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
