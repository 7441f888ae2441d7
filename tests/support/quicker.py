"""Work that tests need not repeat: Megatron's sources and the imported modules stay as they are while they run."""

import gc


def parse_sources_once() -> None:
    """Keep what Megatron reads in the sources of its classes, for the texts of --help, whenever it makes a parser."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read, known = ArgumentGroupFactory._get_field_docstrings, dict[type, dict[str, str]]()

    def docstrings(self: ArgumentGroupFactory, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(self, source)
        return known[source]

    ArgumentGroupFactory._get_field_docstrings = docstrings


def shorten_mock_data() -> None:
    """Let --mock-data be 1,000 sequences: an index of Megatron's 100,000 takes a third of a run of one step."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1_000


def collect_new_objects_alone() -> None:
    """Keep the garbage collector from the half a million objects of modules and cases, and let it come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
