#!/usr/bin/env bash
# usage: [VARIABLE=value ...] ./benchmark.sh
# Trains each of ALGOS on each of ENVS with each of SEEDS, by default the paper's grid. Call it again to continue: it
# skips finished runs and resumes the others. Ctrl-C stops all runs at checkpoints; a second Ctrl-C kills them.
#
#   ALGOS       mdpo_onpolicy trpo ppo mdpo_offpolicy mdpo_tsallis sac
#   ENVS        Hopper-v4 Walker2d-v4 HalfCheetah-v4 Ant-v4 Humanoid-v4 HumanoidStandup-v4
#   SEEDS       1 2 3 4 5
#   PRESET      loaded-gae (on-policy only), loaded or minimal; default: loaded-gae on-policy, loaded off-policy
#   STEPS       steps per run; default: 10000000 on-policy, 1000000 off-policy (3000000 on Ant and Humanoid)
#   EXTRA       more flags for the scripts, such as "--tsallis-q 1.5"; they become part of the run names
#   WORKERS     runs at a time, one thread each; default: the number of cores, with SLURM no limit
#   WANDB_MODE  offline (default), online or disabled; WANDB_PROJECT: mdpo; PYTHON: python
#   DRY_RUN=1   print the commands, run nothing
#   SLURM=1     submit the unfinished runs as one job array; jobs that are preempted or near their time limit stop at a
#               checkpoint, are requeued and resume. For sbatch: PARTITION, TIME, MEM (4G), GPUS (none) and SBATCH_*
#
# A run is named ENV__ALGO__PRESET__STEPS__SEED, plus __EXTRA if set. Its folder is runs/NAME, with a file `finished` at
# the end; its output goes to runs/NAME.log. All runs get --compile; EXTRA=--no-compile turns it off.
# Exit status: 0 all finished (SLURM: submitted), 1 not all finished, 2 invalid input, 128 + signal if stopped.

# --------------------------------------------------------------------------------------------------------------- input
set -uo pipefail
fail() { echo "benchmark.sh: $*" >&2; exit 2; }
[[ ${1-} == --help || ${1-} == -h ]] && sed -n '2,/^$/s/^# \?//p' "$0" && exit
(($# == 0)) || fail "unknown argument $1; settings are variables, see --help."
{ ((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44)) && type flock >/dev/null; } || fail "bash 4.4 and flock required."
on_policy="mdpo_onpolicy trpo ppo" off_policy="mdpo_offpolicy mdpo_tsallis sac" here=$(dirname "$0")
: "${PRESET:=}" "${STEPS:=}" "${WORKERS:=}" "${DRY_RUN:=0}" "${SLURM:=0}" "${WANDB_MODE:=offline}" "${PYTHON:=python}"
[[ $PRESET == loaded-gae ]] && known=$on_policy || known="$on_policy $off_policy"
read -rd '' -a algos <<<"${ALGOS:-$known}"
read -rd '' -a envs <<<"${ENVS:-Hopper-v4 Walker2d-v4 HalfCheetah-v4 Ant-v4 Humanoid-v4 HumanoidStandup-v4}"
read -rd '' -a seeds <<<"${SEEDS:-1 2 3 4 5}"
read -rd '' -a extra <<<"${EXTRA-}"
((${#algos[@]} * ${#envs[@]} * ${#seeds[@]})) || fail "ALGOS, ENVS and SEEDS must not be blank."
[[ ! ${ALGO-}${ENV_ID-}${SEED-} ]] || fail "ALGO, ENV_ID or SEED is set, but this script reads ALGOS, ENVS and SEEDS."
for algo in "${algos[@]}"; do
  [[ " $known " == *" $algo "* ]] || fail "unknown algorithm $algo${PRESET:+ for PRESET $PRESET}; choose from: $known."
done
for number in "${seeds[@]}" ${STEPS:+"$STEPS"} ${WORKERS:+"$WORKERS"}; do
  [[ $number =~ ^(0|[1-9][0-9]{0,14})$ ]] || fail "SEEDS, STEPS and WORKERS must be whole numbers, not $number."
done
[[ $DRY_RUN$SLURM =~ ^[01][01]$ && $WORKERS != 0 ]] || fail "DRY_RUN and SLURM must be 0 or 1, WORKERS at least 1."
ours="env-id|seed|preset|total-timesteps|run-name|runs-dir|(no-)?resume|evaluate|wandb-mode|wandb-project"
[[ ! " ${extra[*]//_/-} " =~ \ (--($ours))[=\ ] ]] || fail "EXTRA must not contain ${BASH_REMATCH[1]}."
slug="${extra[*]}" slug=${slug#"${slug%%[!-]*}"} slug=${slug// --/_} slug=${slug//[^A-Za-z0-9._-]/-}
python=$(realpath -s "$(command -v "$PYTHON")" 2>/dev/null) || fail "$PYTHON not found; set PYTHON." # in full for SLURM
# The scripts themselves refuse the rest: unknown flags, presets and tasks, numbers out of range, missing packages.
problem=$("$python" - "$here" "${algos[*]}" "${envs[*]}" ${PRESET:+--preset "$PRESET"} \
  ${STEPS:+--total-timesteps "$STEPS"} --wandb-mode "$WANDB_MODE" "${extra[@]}" 2>&1 <<'END'
import importlib, itertools, sys
sys.path[0], algos, envs, *flags = sys.argv[1:]
scripts = [importlib.import_module(algo) for algo in algos.split()]
for script in scripts:
    sys.argv[0] = f"{script.__name__}.py"
    script.parse_args(flags)
for script, env_id in itertools.product(scripts, envs.split()):
    script.make_env(env_id)
END
) || { problem=${problem#*rror: } && fail "${problem/#╭/$'\n'╭}"; } # no traceback; tyro's box gets its own lines

# ---------------------------------------------------------------------------------------------------------------- grid
declare -A taken=() # run name -> who has it
if [[ -d runs/slurm ]] && command -v squeue >/dev/null; then
  queue=$(squeue --me --noheader --array --format="%j %K") || fail "squeue cannot list the queue."
  while read -r array index; do # an array is named after its list of commands
    mapfile -t -s "$index" -n 1 run 2>/dev/null <"runs/slurm/$array" || continue # not ours
    [[ ${run[0]-} =~ --run-name\ ([^ ]+) ]] && taken[${BASH_REMATCH[1]}]="in SLURM's queue, array $array"
  done <<<"$queue"
fi
finished() { [[ -f runs/$1/finished && $1 == *"__$(<"runs/$1/finished")__"[0-9]* ]]; } # NAME contains the steps
# NAME: a script locks its run while it trains. The short wait is for other calls that only look.
locked() { [[ -e runs/$1/lock ]] && ! flock --wait 0.1 "runs/$1/lock" true; }
summary() { echo "$done of $total runs are finished."; }
commands=() all=" " total=0 done=0 to_go=0
for seed in "${seeds[@]}"; do # outermost, so that half a grid has all algorithms and tasks
  for env in "${envs[@]}"; do
    for algo in "${algos[@]}"; do
      # 10M is the paper's, as is 3M on Ant and Humanoid off-policy (Section 5.4); 1M is the convention elsewhere.
      preset=loaded-gae steps=10000000
      [[ " $off_policy " == *" $algo "* ]] && preset=loaded steps=1000000
      [[ $preset == loaded && $env =~ ^(Ant|Humanoid)- ]] && steps=3000000
      preset=${PRESET:-$preset} steps=${STEPS:-$steps}
      name=${env//[^A-Za-z0-9._-]/-}__${algo}__${preset}__${steps}__$seed${slug:+__$slug}
      ((${#name} <= 128)) || fail "EXTRA is too long: W&B takes run names of 128 characters, not ${#name}."
      [[ $all == *" $name "* ]] && continue # listed twice
      all+="$name " total=$((total + 1))
      if finished "$name"; then
        done=$((done + 1))
      elif [[ ${taken[$name]-} ]] || locked "$name"; then
        echo "not started: $name: ${taken[$name]-another process trains it}" >&2
      else
        printf -v command ' %q' "$python" "$here/$algo.py" --env-id "$env" --seed "$seed" --total-timesteps "$steps" \
          --preset "$preset" --run-name "$name" --wandb-mode "$WANDB_MODE" --wandb-project "${WANDB_PROJECT:-mdpo}" \
          --resume --compile ${slug:+--wandb-group "${algo}__${preset}__${env}__$slug"} "${extra[@]}"
        commands+=("OMP_NUM_THREADS=1$command") to_go=$((to_go + 1))
      fi
    done
  done
done
((to_go)) || { summary && ((done == total)); exit; }
((!DRY_RUN)) || printf '%s\n' "${commands[@]}"
((DRY_RUN)) || { mkdir -p runs && [[ -w runs ]]; } || fail "cannot write to the folder runs."

# --------------------------------------------------------------------------------------------------------------- SLURM
read -rd '' batch_script <<'END'
#!/usr/bin/env bash
mapfile -t -s "$SLURM_ARRAY_TASK_ID" -n 1 run <"runs/slurm/$SLURM_JOB_NAME"
[[ ${run[0]-} =~ --run-name\ ([^ ]+) ]] || exit 1
name=${BASH_REMATCH[1]} checkpoint=runs/${BASH_REMATCH[1]}/checkpoint.pt requeue=''
exec >>"runs/$name.log" 2>&1
printf '\n=== %s, job %s, restart %s: %s\n' "$(date)" "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "${run[0]}"
before=$(stat -c %y "$checkpoint" 2>&1)
# A script stops at a checkpoint on its first SIGINT or SIGTERM; a second one of the same kind kills it. SLURM sends
# SIGTERM to all processes of a preempted or cancelled job, so near the time limit the script gets SIGINT.
(trap - INT; eval "exec env ${run[0]}") & # a background process would ignore SIGINT
trap 'requeue=1; kill -INT $!' USR1
trap 'requeue=' TERM # SLURM itself requeues preempted jobs, and cancelled ones must not come back
while kill -0 $! 2>/dev/null; do wait $!; done # a trap ends a wait early
wait $!
status=$?
# Requeue only with a new checkpoint: a run that reaches none within its time limit would come back forever.
[[ $requeue && $status -ge 128 && $(stat -c %y "$checkpoint" 2>&1) != "$before" ]] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
END
if ((SLURM)); then # options are arguments, since SBATCH_* variables override #SBATCH lines
  array=mdpo-$(date +%Y%m%d-%H%M%S)-$$
  submit=(sbatch --parsable --job-name="$array" --array="0-$((to_go - 1))${WORKERS:+%$WORKERS}" --ntasks=1
    --cpus-per-task=1 --mem="${MEM:-4G}" ${TIME:+--time="$TIME"} ${PARTITION:+--partition="$PARTITION"}
    ${GPUS:+--gres=gpu:"$GPUS"} --requeue --signal=B:USR1@120 --open-mode=append --output="runs/slurm/%x_%a.log")
  ((!DRY_RUN)) || { printf '%s\n' "${submit[*]}" "$batch_script" && exit; }
  limit=$(scontrol show config | awk '$1 == "MaxArraySize" {print $3}')
  ((to_go <= ${limit:-1001})) || fail "$to_go runs exceed this cluster's MaxArraySize, $limit; choose fewer SEEDS."
  { mkdir -p runs/slurm && printf '%s\n' "${commands[@]}" >"runs/slurm/$array"; } || fail "cannot write to runs/slurm."
  job=$("${submit[@]}" <<<"$batch_script") || { rm "runs/slurm/$array" && fail "sbatch failed."; }
  echo "Submitted $to_go runs as job array $job. See squeue --me and runs/*.log. $(summary)"
fi
((!SLURM && !DRY_RUN)) || exit 0

# -------------------------------------------------------------------------------------------------------- this machine
cell() { # COMMAND: trains a run. Prints a line when it starts and one when it ends, with its exit status.
  trap : INT TERM HUP # the run stops on these, and this waits for it
  [[ $1 =~ --run-name\ ([^ ]+) ]]
  echo "+1 ${BASH_REMATCH[1]}"
  printf '\n=== %s: %s\n' "$(date)" "$1" >>"runs/${BASH_REMATCH[1]}.log"
  ([[ ! -s $stop_file ]] && eval "exec env $1") >>"runs/${BASH_REMATCH[1]}.log" 2>&1
  echo "-1 ${BASH_REMATCH[1]} $?" # last, so that the cell ends with 0: xargs stops at a 255
}
on_signal() { # NUMBER
  if ((!stop)); then
    stop=$1 stopped_at=$SECONDS end=", stopping at checkpoints$end"
    echo "$stop" >"$stop_file" # first, for cells that are about to start a run
    kill -INT -- "-$group" 2>/dev/null
    echo -n "$clear$running running$end" 2>/dev/null
  elif ((SECONDS > stopped_at + 1)); then # not at once: `timeout` sends its signal twice
    kill -KILL -- "-$group" 2>/dev/null
  fi
}
stop_file=$(mktemp) group='' stop=0 running=0 line='' failures=()
[[ -t 1 ]] && clear=$'\r\e[K' end='' || clear='' end=$'\n' # on a terminal the status line is rewritten in place
trap 'rm -f "$stop_file"' EXIT
trap 'on_signal 1' HUP
trap 'on_signal 2' INT
trap 'on_signal 15' TERM
trap : PIPE # Ctrl-C also ends a `tee` behind this script
export stop_file && export -f cell
# shellcheck disable=SC2016 # for the inner bash. setsid: the terminal's Ctrl-C reaches only this script.
exec 3< <(trap - INT QUIT && exec setsid xargs -d '\n' -n 1 -P "${WORKERS:-$(OMP_NUM_THREADS='' nproc)}" \
  "$BASH" -c 'cell "$1"' cell < <(printf '%s\n' "${commands[@]}")) # trap: a background process ignores SIGINT
group=$!
while IFS= read -r -t 1 -u 3 part; code=$?; line+=$part; ((code == 0 || code > 128)); do
  ((code == 0)) || continue # above 128: no news within a second, or half a line
  read -r change name status <<<"$line" && line=''
  running=$((running + change)) to_go=$((to_go - (change > 0)))
  if [[ $status == 2 ]] && locked "$name"; then # refused: another process was faster
    echo "${clear}not started: $name: another process trains it" >&2
  elif [[ $status ]] && finished "$name"; then
    done=$((done + 1))
  elif [[ $status ]] && ((!stop)); then
    failures+=("$name, exit status $status")
  fi
  echo -n "$clear$done done, $running running, ${#failures[@]} failed, $to_go to go$end" 2>/dev/null
done
echo -n "$clear"
for failure in "${failures[@]}"; do
  echo "failed: $failure; the end of runs/${failure%,*}.log:"
  tail -c 2000 "runs/${failure%,*}.log" | tr '\r' '\n' | tail -n 12 | sed 's/^/    /'
done >&2
summary
((!stop)) || { echo "Stopped; the same command continues from the checkpoints." >&2; exit $((128 + stop)); }
((done == total))
