"""Job: does it learn, how fast, and where does the time of a step go?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from deploy.grafana.generate.panels import (
    Query,
    board,
    choice,
    graph,
    heading,
    mark,
    number,
    rows,
    states,
)

_JOB = 'job_id="$job_id"'
_PIPELINE = "outlast_rank_pipeline_seconds_total"
# 1 - sum(busy) / (ranks x longest): what a rank idles after its last action it does not note.
_BUBBLE = (
    f'1 - avg(rate({_PIPELINE}{{{_JOB},state="busy"}}[$__rate_interval])) / '
    f"max(sum by (rank) (rate({_PIPELINE}{{{_JOB}}}[$__rate_interval])))"
)


def dashboard() -> builders.Dashboard:
    """One job."""
    whole = board("outlast-job", "Job", "One job: progress, loss, speed, and its restarts.")
    whole.with_variable(
        choice("job_id", "Job", "label_values(outlast_job_info, job_id)", many=False)
    )
    whole.annotation(
        mark("Restarts", f"changes(outlast_job_attempt{{{_JOB}}}[$__rate_interval]) > 0")
    )
    _now(whole)
    _learning(whole)
    _time(whole)
    _faults(whole)
    return whole


def _now(whole: builders.Dashboard) -> None:
    for panel in (
        number("Step", "Last completed step.", "none", f"max(outlast_step{{{_JOB}}})"),
        number(
            "Done",
            "Share of the job's steps that are completed.",
            "percentunit",
            f"max(outlast_step{{{_JOB}}}) / max(outlast_job_target_step{{{_JOB}}})",
        ),
        number("Loss", "Training loss of the last step.", "none", f"max(outlast_loss{{{_JOB}}})"),
        number(
            "Speed",
            "Tokens per second over the last steps.",
            "none",
            f"max(outlast_tokens_per_second{{{_JOB}}})",
        ),
        number(
            "Model FLOPs utilization",
            "Achieved model FLOPs, windows counted as windows, as a share of the devices' peak: of "
            "the data sheet on a known GPU, else as the matmul check measured it.",
            "percentunit",
            f'max(outlast_model_flops_utilization_ratio{{{_JOB},convention="windowed"}})',
        ),
        number(
            "Hardware FLOPs utilization",
            "As the model FLOPs utilization, with what the backward pass computes a second time.",
            "percentunit",
            f'max(outlast_hardware_flops_utilization_ratio{{{_JOB},convention="windowed"}})',
        ),
        number(
            "Epochs",
            "Passes over the data of training, all sources together.",
            "none",
            f"max(outlast_epochs{{{_JOB}}})",
        ),
        number(
            "Time left",
            "Until the last step, at the pace of the last steps.",
            "s",
            f"max(outlast_time_left_seconds{{{_JOB}}})",
        ),
        number(
            "Faults it may survive",
            "What is left of the retry budget; it refills with the next stored checkpoint.",
            "none",
            f"max(outlast_retries_left{{{_JOB}}})",
        ),
    ):
        whole.with_panel(panel)


def _learning(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Learning"))
    for panel in (
        graph(
            "Loss",
            "Training loss. It must not move when a step is done again after a fault.",
            "none",
            Query(f"max(outlast_loss{{{_JOB}}})", "loss"),
        ),
        graph(
            "Perplexity",
            "What exp(loss) of training is, where the loss is the cross-entropy of tokens.",
            "none",
            Query(f"max(outlast_perplexity{{{_JOB}}})", "perplexity"),
        ),
        graph(
            "Gradient norm",
            "Global norm of the gradient before it is clipped.",
            "none",
            Query(f"max(outlast_grad_norm{{{_JOB}}})", "norm"),
        ),
        graph(
            "Step",
            "Last completed step; it falls when steps are done again.",
            "none",
            Query(f"max(outlast_step{{{_JOB}}})", "step"),
        ),
        graph(
            "Learning rate",
            "As its schedule gives it.",
            "none",
            Query(f"max(outlast_learning_rate{{{_JOB}}})", "rate"),
        ),
    ):
        whole.with_panel(panel)


def _time(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Time"))
    for panel in (*_speed(), *_shares_of_time(), *_data(), *_communication(), *_load()):
        whole.with_panel(panel)


def _speed() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Time of a step",
            "From data to optimizer step; what checkpoints stall is not in it.",
            "s",
            Query(f"job:outlast_step_duration_seconds:p50_rate5m{{{_JOB}}}", "half of them"),
            Query(f"job:outlast_step_duration_seconds:p99_rate5m{{{_JOB}}}", "99 of 100"),
        ),
        graph(
            "Tokens trained on",
            "Tokens per second over a longer window, redone steps included.",
            "none",
            Query(f"sum(rate(outlast_tokens_total{{{_JOB}}}[$__rate_interval]))", "tokens/s"),
        ),
    )


def _shares_of_time() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Time by phase",
            "Mean share of a rank's time in each phase of its steps; checkpoint is the stall of "
            "stage 1.",
            "percentunit",
            Query(f"job_phase:outlast_rank_phase_seconds:rate5m{{{_JOB}}}", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Passes",
            "Mean share of a rank's time in forward and in backward passes, waiting left out.",
            "percentunit",
            Query(
                "avg by (direction) (rate(outlast_rank_compute_seconds_total"
                f"{{{_JOB}}}[$__rate_interval]))",
                "{{direction}}",
            ),
            stacked=True,
        ),
        graph(
            "Pipeline bubble",
            "Share of the time of all ranks in which they do not compute, as long as the rank that "
            "takes longest over the pipeline; beside what the schedule has in theory.",
            "percentunit",
            Query(_BUBBLE, "measured"),
            Query(f"max(outlast_rank_expected_bubble_ratio{{{_JOB}}})", "theory"),
        ),
    )


def _data() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Waiting for data",
            "Share of a rank's time in which its batch was not read yet, of the rank that waits "
            "longest.",
            "percentunit",
            Query(f"job:outlast_rank_data_wait_seconds:max5m{{{_JOB}}}", "share"),
        ),
        graph(
            "Steps that wait for data",
            "Share of its steps in which a rank waited for its batch, of the rank with most.",
            "percentunit",
            Query(
                "max(max by (rank) (rate(outlast_rank_data_waits_total"
                f"{{{_JOB}}}[$__rate_interval]))) / "
                f"scalar(max(rate(outlast_step_duration_seconds_count{{{_JOB}}}[$__rate_interval])))",
                "share",
            ),
        ),
    )


def _communication() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Time in communication",
            "Mean share of a rank's time in operations of each group, waiting for peers included.",
            "percentunit",
            Query(f"job_group:outlast_rank_communication_seconds:rate5m{{{_JOB}}}", "{{group}}"),
            stacked=True,
        ),
        graph(
            "Communication that was hidden",
            "Mean share of a rank's time in which messages of each group were under way while it "
            "computed.",
            "percentunit",
            Query(
                "avg by (group) (rate(outlast_rank_communication_hidden_seconds_total"
                f"{{{_JOB}}}[$__rate_interval]))",
                "{{group}}",
            ),
            stacked=True,
        ),
    )


def _load() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Memory of the largest rank",
            "Peak so far, beside the estimate of `outlast plan`.",
            "bytes",
            Query(f"max(outlast_rank_memory_peak_bytes{{{_JOB}}})", "measured"),
            Query(f"max(outlast_rank_expected_memory_bytes{{{_JOB}}})", "estimate"),
        ),
        graph(
            "Bytes sent",
            "What all ranks send to others, by group.",
            "Bps",
            Query(
                f"sum by (group) (rate(outlast_rank_sent_bytes_total{{{_JOB}}}[$__rate_interval]))",
                "{{group}}",
            ),
        ),
        graph(
            "FLOPs",
            "Model FLOPs per second, and those of the hardware with what is recomputed, by both "
            "conventions of `outlast plan`.",
            "flops",
            Query(
                f"max by (convention) (outlast_model_flops_per_second{{{_JOB}}})", "{{convention}}"
            ),
            Query(
                f"max by (convention) (outlast_hardware_flops_per_second{{{_JOB}}})",
                "{{convention}}, hardware",
            ),
        ),
        graph(
            "Slowest rank",
            "Own work of the slowest rank of each stage as a multiple of the stage's median.",
            "none",
            Query(f"job_stage:outlast_rank_work_seconds:slowdown5m{{{_JOB}}}", "stage {{stage}}"),
        ),
    )


def _standing() -> tuple[Builder[Panel], ...]:
    return (
        number(
            "In this state for",
            "Time since the job came into its present state.",
            "s",
            f"time() - max(outlast_job_state_change_timestamp_seconds{{{_JOB}}})",
        ),
        number(
            "Steps left out",
            "Steps whose batch is not trained on: their loss was NaN or Inf, or far off.",
            "none",
            f"max(outlast_job_skipped_steps{{{_JOB}}})",
        ),
        number(
            "ETTR",
            "Productive share of the job's whole time.",
            "percentunit",
            f"max(outlast_job_ettr_ratio{{{_JOB}}})",
        ),
    )


def _faults(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Faults"))
    for panel in (
        states(
            "State",
            "The job's state.",
            Query(f"max by (state) (outlast_job_state{{{_JOB}}}) == 1", "{{state}}"),
        ),
        *_standing(),
        graph(
            "Effective training time",
            "Seconds of progress in a second, over the last hour.",
            "percentunit",
            Query(f"job:outlast_goodput_seconds:rate1h{{{_JOB}}}", "progress"),
        ),
        rows(
            "Incidents that are over",
            "By cause and by what was done.",
            f"sum by (cause, action) (outlast_incidents_total{{{_JOB}}})",
        ),
        rows(
            "Nodes of the job",
            "Where its ranks run now; empty once it has ended.",
            f"max by (node) (outlast_job_node_info{{{_JOB}}})",
        ),
    ):
        whole.with_panel(panel)
