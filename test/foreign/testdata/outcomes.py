"""Runs modules of Python's own test suite, and prints the outcome of each test: a name, a tab, and what it came to."""
import sys
import unittest


class Outcomes(unittest.TestResult):
    def tell(self, test, outcome):
        print(test.id(), outcome, sep="\t", flush=True)

    def addSuccess(self, test):
        self.tell(test, "passed")

    def addExpectedFailure(self, test, err):
        self.tell(test, "passed")

    def addUnexpectedSuccess(self, test):
        self.tell(test, "failed")

    def addSkip(self, test, reason):
        self.tell(test, "skipped")

    def addError(self, test, err):
        self.tell(test, "failed")
        print(self._exc_info_to_string(err, test), file=sys.stderr)

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addError(test, err)


for module in sys.argv[1:]:
    unittest.defaultTestLoader.loadTestsFromName("test." + module).run(Outcomes())
