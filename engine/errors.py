"""What rackplan raises. Messages are one line: the option or file and row, the value, the mend."""


class RackplanError(Exception):
    """Base of every error that a user can mend."""


class InputError(RackplanError):
    """An option, a file or a deployment is wrong (the command line exits 2)."""


class InfeasibleError(RackplanError):
    """The input is right but nothing meets it: no memory, no plan (the command line exits 3)."""


class DeployError(RackplanError):
    """A running engine did not do what was asked of it; what became of it is said (the command line exits 4)."""
