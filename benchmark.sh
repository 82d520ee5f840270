#!/usr/bin/env bash
# usage: [VARIABLE=value ...] ./benchmark.sh
#
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
#   SLURM=1     submit the unfinished runs as one job array. A job that is preempted or near its time limit stops at a
#               checkpoint, is requeued and resumes. PARTITION, TIME, MEM (4G) and GPUS (none) are passed to sbatch;
#               SBATCH_ACCOUNT and the like work too
#
# A run is named ENV__ALGO__PRESET__STEPS__SEED, plus __EXTRA if set. Its folder is runs/NAME, with a file `finished` at
# the end; its output goes to runs/NAME.log. All scripts except trpo get --compile; EXTRA=--no-compile turns it off.
# Exit status: 0 all finished (SLURM: submitted), 1 not all finished, 2 invalid input, 128 + signal if stopped.

set -uo pipefail
fail() { echo "benchmark.sh: $*" >&2; exit 2; }

# --------------------------------------------------------------------------------------------------------------- input
[[ ${1-} == --help || ${1-} == -h ]] && sed -n '2,/^$/s/^# \?//p' "$0" && exit
(($# == 0)) || fail "unknown argument $1; settings are variables, see --help."
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is required, this is $BASH_VERSION."
command -v flock >/dev/null || fail "flock not found; install util-linux."
on_policy="mdpo_onpolicy trpo ppo" off_policy="mdpo_offpolicy mdpo_tsallis sac"
PRESET=${PRESET-} STEPS=${STEPS-} WORKERS=${WORKERS-} WANDB_MODE=${WANDB_MODE:-offline} PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0} SLURM=${SLURM:-0}
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
here=$(dirname "$0")
python=$(command -v "$PYTHON") || fail "$PYTHON not found; set PYTHON or activate the virtual environment."
python=$(realpath -s "$python") # a SLURM node may have another PATH
# The scripts themselves refuse the rest: unknown flags, presets and tasks, numbers out of range, missing packages.
problem=$("$python" - "$here" "${algos[*]}" "${envs[*]}" ${PRESET:+--preset "$PRESET"} \
  ${STEPS:+--total-timesteps "$STEPS"} --wandb-mode "$WANDB_MODE" "${extra[@]}" 2>&1 <<'END'
import importlib, itertools, sys
folder, algos, envs, *flags = sys.argv[1:]
sys.path.insert(0, folder)
scripts = [importlib.import_module(algo) for algo in algos.split()]
for script in scripts:
    sys.argv[0] = f"{script.__name__}.py"
    script.parse_args(flags)
for script, env_id in itertools.product(scripts, envs.split()):
    script.make_env(env_id)
END
) || {
  problem=${problem#*rror: }   # without the warnings or the traceback before it
  fail "${problem/#╭/$'\n'╭}" # tyro's box gets its own lines
}

# ---------------------------------------------------------------------------------------------------------------- grid
declare -A taken=() # run name -> who has it
if [[ -d runs/slurm ]] && command -v squeue >/dev/null; then
  queue=$(squeue --me --noheader --array --format="%j %K") || fail "squeue cannot list the queue."
  while read -r array index; do # an array is named after its list of commands
    [[ -f runs/slurm/$array ]] || continue
    mapfile -t -s "$index" -n 1 run <"runs/slurm/$array"
    [[ ${run[0]-} =~ --run-name\ ([^ ]+) ]] && taken[${BASH_REMATCH[1]}]="in SLURM's queue, array $array"
  done <<<"$queue"
fi
finished() { [[ -f runs/$1/finished && $(<"runs/$1/finished") == "$2" ]]; } # NAME STEPS
# NAME: a script locks its run while it trains. The short wait is for other calls that only look.
locked() { [[ -e runs/$1/lock ]] && ! flock --wait 0.1 "runs/$1/lock" true; }
summary() { echo "$done of $total runs are finished."; }
commands=() all=" " total=0 done=0 elsewhere=0
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
      if finished "$name" "$steps"; then
        done=$((done + 1))
      elif [[ ${taken[$name]-} ]] || locked "$name"; then
        elsewhere=$((elsewhere + 1))
        echo "not started: $name: ${taken[$name]-another process trains it}" >&2
      else
        [[ $algo == trpo ]] && compile='' || compile=--compile # measured: faster for all but trpo
        printf -v command ' %q' "$python" "$here/$algo.py" --env-id "$env" --seed "$seed" --preset "$preset" \
          --total-timesteps "$steps" --run-name "$name" --resume --wandb-mode "$WANDB_MODE" \
          --wandb-project "${WANDB_PROJECT:-mdpo}" ${compile:+"$compile"} \
          ${slug:+--wandb-group "${algo}__${preset}__${env}__$slug"} "${extra[@]}"
        commands+=("OMP_NUM_THREADS=1$command")
      fi
    done
  done
done
((${#commands[@]})) || { summary && ((done == total)); exit; }
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
if ((SLURM)); then
  array=mdpo-$(date +%Y%m%d-%H%M%S)-$$
  # As arguments, since SBATCH_* variables override #SBATCH lines.
  submit=(sbatch --parsable --job-name="$array" --array="0-$((${#commands[@]} - 1))${WORKERS:+%$WORKERS}" --ntasks=1
    --cpus-per-task=1 --mem="${MEM:-4G}" ${TIME:+--time="$TIME"} ${PARTITION:+--partition="$PARTITION"}
    ${GPUS:+--gres=gpu:"$GPUS"} --requeue --signal=B:USR1@120 --open-mode=append --output="runs/slurm/%x_%a.log")
  ((!DRY_RUN)) || { printf '%s\n' "${submit[*]}" "$batch_script" && exit; }
  command -v sbatch >/dev/null || fail "sbatch not found; SLURM=1 is for the login node of a cluster."
  limit=$(scontrol show config | awk '$1 == "MaxArraySize" {print $3}')
  ((${#commands[@]} <= ${limit:-1001})) ||
    fail "${#commands[@]} runs exceed this cluster's MaxArraySize, $limit; submit part of the grid, such as SEEDS=1."
  mkdir -p runs/slurm
  printf '%s\n' "${commands[@]}" >"runs/slurm/$array"
  job=$("${submit[@]}" <<<"$batch_script") || { rm "runs/slurm/$array" && fail "sbatch refused the job."; }
  echo "Submitted ${#commands[@]} runs as job array $job. See squeue --me and runs/*.log. $(summary)"
fi
((!SLURM && !DRY_RUN)) || exit 0

# -------------------------------------------------------------------------------------------------------- this machine
cell() { # COMMAND: trains a run. Prints a line when it starts and one when it ends, with its exit status.
  trap : INT TERM HUP # the run stops on these, and this waits for it
  [[ $1 =~ --total-timesteps\ ([0-9]+)\ --run-name\ ([^ ]+) ]]
  echo "+1 ${BASH_REMATCH[*]:1}"
  (
    [[ ! -e $state/stop ]] || exit
    printf '\n=== %s: %s\n' "$(date)" "$1"
    eval "exec env $1"
  ) </dev/null >>"runs/${BASH_REMATCH[2]}.log" 2>&1
  echo "-1 ${BASH_REMATCH[*]:1} $?" # last, so that the cell ends with 0: xargs stops at a 255
}
on_signal() { # NUMBER
  if ((!stop)); then
    stop=$1 stopped_at=$SECONDS
    touch "$state/stop" # first, for cells that are about to start a run
    kill -INT -- ${group:+"-$group"} 2>/dev/null
  elif ((SECONDS > stopped_at + 1)); then # not at once: `timeout` sends its signal twice
    kill -KILL -- "-$group" 2>/dev/null
  fi
}
state=$(mktemp -d) group='' stop=0 running=0 failures=() shown=''
[[ -t 1 ]] && clear=$'\r\e[K' end='' || clear='' end=$'\n' # on a terminal the status line is rewritten in place
trap 'rm -rf "$state"' EXIT
trap 'on_signal 1' HUP
trap 'on_signal 2' INT
trap 'on_signal 15' TERM
trap : PIPE # Ctrl-C also ends a `tee` behind this script
mkfifo "$state/events"
export state && export -f cell
workers=${WORKERS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}
set -m # gives xargs a process group of its own, so that the terminal's Ctrl-C reaches only this script
# shellcheck disable=SC2016 # for the inner bash
xargs -d '\n' -n 1 -P "$workers" "$BASH" -c 'cell "$1"' cell < <(printf '%s\n' "${commands[@]}") >"$state/events" &
group=$!
set +m
exec 3<"$state/events"
while read -r -t 1 -u 3 change steps name status || (($? > 128)); do # above 128: no news within a second
  running=$((running + change))
  if [[ $status == 2 ]] && locked "$name"; then # refused: another process was faster
    elsewhere=$((elsewhere + 1))
    echo "${clear}not started: $name: another process trains it" >&2
  elif [[ $status ]] && finished "$name" "$steps"; then
    done=$((done + 1))
  elif [[ $status ]] && ((!stop)); then
    failures+=("$name, exit status $status")
  fi
  line="$done done, $running running, ${#failures[@]} failed"
  line+=", $((total - done - running - ${#failures[@]} - elsewhere)) to go"
  ((!stop)) || line+=", stopping at checkpoints"
  [[ $line == "$shown" ]] || printf '%s' "$clear$line$end" 2>/dev/null
  shown=$line
done

printf '%s' "$clear"
for failure in "${failures[@]}"; do
  echo "failed: $failure; the end of runs/${failure%,*}.log:"
  tail -c 2000 "runs/${failure%,*}.log" | tr '\r' '\n' | tail -n 12 | sed 's/^/    /'
done >&2
summary
((!stop)) || { echo "Stopped; the same command continues from the checkpoints." >&2; exit $((128 + stop)); }
((done == total))
