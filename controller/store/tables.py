"""The tables of the controller's database, whichever database that is.

What is stored in them is the business of `journal`, `curves` and `diagnoses`.
"""

from __future__ import annotations

import sqlalchemy as sa

# Of the tables and of what is in their rows. A controller reads every older one, and none that is
# newer: it would lose what it does not know. 2: rows of changed fields, of many orders, of many
# answers (`controller.core.written`).
SCHEMA_VERSION = 2

METADATA = sa.MetaData()


class FreeText(sa.types.TypeDecorator[str]):
    """What programs and people said: it may have zero bytes, which PostgreSQL has no place for."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """What is written: \\0 in their place."""
        return None if value is None else value.replace("\0", "\\0")


# One row: who may write.
CONTROLLER = sa.Table(
    "controller",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("probed_s", sa.Double, nullable=False),
)

# Where controllers of several machines share the database: which session wrote a row, how often it
# was written, and how soon it will be again.
LEASE = sa.Table(
    "lease",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.BigInteger, nullable=False),
    sa.Column("renewals", sa.BigInteger, nullable=False),
    sa.Column("limit_s", sa.Double, nullable=False),
)

CHANGES = sa.Table(
    "facts",
    METADATA,
    sa.Column(
        "seq",
        sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("fact", sa.Text, nullable=False),
    # Numbers of truncated changes are never given out again.
    sqlite_autoincrement=True,
)

SNAPSHOTS = sa.Table(
    "snapshots",
    METADATA,
    # The snapshot holds every change up to and including this one.
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
)

STEPS = sa.Table(
    "steps",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    # Rises with every row written, so that a watcher can ask for what is new.
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    # SQLite has no NaN: it becomes NULL here, and NaN again when it is read.
    sa.Column("loss", sa.Double),
    sa.Column("grad_norm", sa.Double),
    sa.Column("learning_rate", sa.Double),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("duration_s", sa.Double, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("evaluated", sa.Boolean, nullable=False),
    sa.Column("eval_loss", sa.Double),
    # A `StepSplit`, in protobuf's own form; NULL where it is not known.
    sa.Column("split", sa.LargeBinary),
    sa.Index("steps_by_version", "job_id", "version"),
)

# Losses of held-out sets that have names, of the steps that evaluated; as their rows of `steps`.
EVALUATIONS = sa.Table(
    "evaluations",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("name", FreeText, primary_key=True),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("loss", sa.Double),
)

# Tokens that jobs trained on, redone steps included; `steps` keeps each step once.
TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)


# The states that jobs went through, each from `at_s` on.
JOB_STATES = sa.Table(
    "job_states",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    # Rises by one from each state of a job to its next.
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", FreeText, nullable=False),
)

# Checkpoints that were committed, whether or not they are still in storage.
COMMITS = sa.Table(
    "commits",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    # 0, too, where it is not known; so it is with the other two.
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

# Events on which a turn failed, for the next controller to skip and for people to read.
POISONED = sa.Table(
    "poisoned",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    # Who sent it, and its number; "" for what no agent sent.
    sa.Column("source", FreeText, nullable=False),
    sa.Column("event", FreeText, nullable=False),
    sa.Column("error", FreeText, nullable=False),
)

# Runs of diagnostics, without their findings.
DIAGNOSES = sa.Table(
    "diagnoses",
    METADATA,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("started_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)

# Their findings, of which there may be tens of thousands: a list of runs must not read them.
DIAGNOSIS_FINDINGS = sa.Table(
    "diagnosis_findings",
    METADATA,
    sa.Column("run_id", sa.Text, primary_key=True),
    # A `DiagnosticRun` that has nothing else, in protobuf's own form.
    sa.Column("run", sa.LargeBinary, nullable=False),
)

# Of each job's steps by hour, attempt and layout, for months; and up to which row of `steps` and
# which hour they have been put together.
HOURS = sa.Table(
    "hours",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("begun_s", sa.Double, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("layout", sa.Text, nullable=False),
    sa.Column("num_steps", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("step_s", sa.Double, nullable=False),
    sa.Column("spread_s", sa.Double),
    sa.Column("late_s", sa.Double),
)
HOURS_READ = sa.Table(
    "hours_read",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("until_s", sa.Double, nullable=False),
)

# What each node was like among those of its jobs, by day: sums over the windows of the day.
NODE_DAYS = sa.Table(
    "node_days",
    METADATA,
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("num_windows", sa.BigInteger, nullable=False),
    sa.Column("num_slowest", sa.BigInteger, nullable=False),
    sa.Column("expected_slowest", sa.Double, nullable=False),
    sa.Column("ratios", sa.Double, nullable=False),
    sa.Column("lasts", sa.Double, nullable=False),
    sa.Column("service_s", sa.Double, nullable=False),
    # Old days are dropped with each that is added.
    sa.Index("node_days_by_day", "day"),
)

# What healthy measurements between nodes were worth.
FLEET_BASELINES = sa.Table(
    "fleet_baselines",
    METADATA,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)

# The key for which each node has got a certificate, and until when that holds.
NODE_CERTIFICATES = sa.Table(
    "node_certificates",
    METADATA,
    sa.Column("node_id", sa.Text, primary_key=True),
    # SHA-256 of the public key, in hexadecimal.
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("expires_s", sa.Double, nullable=False),
)
