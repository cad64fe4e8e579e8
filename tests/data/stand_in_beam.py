"""A stand-in for the part of Apache Beam that kvjax.data.beam uses; runs elements one by one."""

import argparse
import importlib.machinery
import pickle
import types


class PipelineOptions:
    """Parses two options, and ignores others."""

    def __init__(self, flags):
        self._flags = flags

    def get_all_options(self, retain_unknown_options):
        assert retain_unknown_options
        parser = argparse.ArgumentParser()
        parser.add_argument("--runner")
        parser.add_argument("--direct_num_workers", type=int)
        return vars(parser.parse_known_args(self._flags)[0])

    def view_as(self, kind):
        assert kind is StandardOptions
        return kind(self.get_all_options(True)["runner"])


class StandardOptions:
    def __init__(self, runner):
        self.runner = runner


class DoFn:
    pass


class Pipeline:
    """A pipeline of elements and a DoFn; `run` pickles both, as for workers."""

    def __init__(self, *, options):
        self._runner = options.view_as(StandardOptions).runner
        if self._runner == "NoSuchRunner":
            raise ValueError(f"Unknown runner\n {self._runner}")
        self._stages = []

    def __or__(self, stage):
        self._stages.append(stage)
        return self

    def run(self):
        if self._runner == "FlinkRunner":
            raise RuntimeError("no Java, so no job server")
        (_, elements), (shuffled, _), (done, function) = self._stages
        assert (shuffled, done) == ("reshuffle", "do")
        function = pickle.loads(pickle.dumps(function))
        function.setup()
        failed = []
        for element in pickle.loads(pickle.dumps(elements)):
            try:
                assert list(function.process(element)) == []
            except Exception as error:
                failed.append(RuntimeError(f"{error} [while running 'ParDo']"))
        self._failed = failed
        return self

    def wait_until_finish(self):
        for error in self._failed:
            raise error


def modules() -> dict[str, types.ModuleType]:
    """Returns the modules that replace Beam's, by name."""
    beam = types.ModuleType("apache_beam")
    beam.__spec__ = importlib.machinery.ModuleSpec("apache_beam", None)
    beam.Pipeline, beam.DoFn = Pipeline, DoFn
    beam.Create = lambda elements: ("create", elements)
    beam.Reshuffle = lambda: ("reshuffle", None)
    beam.ParDo = lambda function: ("do", function)
    options = types.ModuleType("apache_beam.options.pipeline_options")
    options.PipelineOptions, options.StandardOptions = PipelineOptions, StandardOptions
    return {
        "apache_beam": beam,
        "apache_beam.options": types.ModuleType("apache_beam.options"),
        "apache_beam.options.pipeline_options": options,
    }
