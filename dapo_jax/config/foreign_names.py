"""Settings that correspond to arguments of TRL and verl, for hints in error messages.

docs/from_trl.md and docs/from_verl.md explain the differences; a test compares them with this.
"""

# A line per setting: the setting, or several, and the arguments that they replace.
_TABLE = """
rollout.samples_per_prompt: num_generations rollout.n group_size
rollout.prompts_per_step: batch_size train_batch_size data.train_batch_size generation_batch_size
rollout.updates_per_rollout: steps_per_generation actor.ppo_mini_batch_size mini_batch_size
sampler.max_response_tokens: max_completion_length data.max_response_length
sampler.max_response_tokens: max_new_tokens max_tokens
data.max_prompt_tokens: max_prompt_length data.max_prompt_length
sampler.temperature: temperature rollout.temperature
sampler.top_p: top_p rollout.top_p
sampler.top_k: top_k rollout.top_k
evaluation.samples_per_problem: num_generations_eval rollout.val_kwargs.n
evaluation.temperature: rollout.val_kwargs.temperature
evaluation.top_p: rollout.val_kwargs.top_p
optimizer.learning_rate: learning_rate lr actor.optim.lr
optimizer.schedule: lr_scheduler_type lr_scheduler_kwargs lr_scheduler actor.optim.lr_scheduler_type
optimizer.warmup_steps: warmup_steps warmup_ratio actor.optim.lr_warmup_steps
optimizer.weight_decay: weight_decay actor.optim.weight_decay
optimizer.beta1: adam_beta1 actor.optim.betas
optimizer.beta2: adam_beta2
optimizer.eps: adam_epsilon
optimizer.max_grad_norm: max_grad_norm actor.optim.clip_grad
algorithm.aggregate: loss_type actor.loss_agg_mode actor.loss_scale_factor
algorithm.weight, algorithm.ratio, algorithm.region: actor.policy_loss.loss_mode
algorithm.decay_positive: sapo_temperature_pos vespo_lambda_pos actor.policy_loss.tau_pos
algorithm.decay_negative: sapo_temperature_neg vespo_lambda_neg actor.policy_loss.tau_neg
algorithm.power_positive: vespo_k_pos
algorithm.power_negative: vespo_k_neg
algorithm.ratio: importance_sampling_level
algorithm.advantage: scale_rewards multi_objective_aggregation algorithm.adv_estimator
algorithm.advantage: algorithm.norm_adv_by_std_in_grpo adv_estimator
algorithm.gamma: gamma algorithm.gamma
algorithm.lambda_policy: algorithm.lam
algorithm.clip_low: epsilon actor.clip_ratio_low actor.clip_ratio
algorithm.clip_high: epsilon_high actor.clip_ratio_high
algorithm.dual_clip: delta actor.clip_ratio_c
algorithm.kl_coefficient: beta actor.kl_loss_coef algorithm.kl_ctrl.kl_coef
algorithm.kl_coefficient: actor.policy_loss.dro_beta
algorithm.kl: actor.use_kl_loss algorithm.use_kl_in_reward
algorithm.kl_estimator: actor.kl_loss_type
algorithm.kl_importance: use_bias_correction_kl
algorithm.rejection: off_policy_mask_threshold algorithm.rollout_correction.rollout_rs
algorithm.rejection_low: vllm_importance_sampling_clip_min
algorithm.rejection_low, algorithm.rejection_high: algorithm.rollout_correction.rollout_rs_threshold
algorithm.importance_cap: vllm_importance_sampling_correction vllm_importance_sampling_clip_max
algorithm.importance_cap: vllm_importance_sampling_cap
algorithm.importance_cap: algorithm.rollout_correction.rollout_is_threshold
algorithm.importance_ratio: vllm_importance_sampling_mode algorithm.rollout_correction.rollout_is
algorithm.old_logprobs: algorithm.rollout_correction.bypass_mode
algorithm.entropy_coefficient: entropy_coef actor.entropy_coeff
algorithm.overlong_filtering: mask_truncated_completions
algorithm.overlong_punishment: reward.reward_manager.name
algorithm.overlong_buffer_share: reward.reward_kwargs.overlong_buffer_cfg.len
algorithm.overlong_buffer_share: reward.reward_kwargs.overlong_buffer_cfg.enable
algorithm.dynamic_sampling: algorithm.filter_groups.enable
reward.correct: algorithm.filter_groups.metric
rollout.max_sample_rounds: algorithm.filter_groups.max_num_gen_batches
algorithm.value_clip: critic.cliprange_value
critic.optimizer.learning_rate: critic.optim.lr
critic.pretrain_steps: trainer.critic_warmup
reward.parts: reward_funcs reward_weights reward.custom_reward_function.path
reward.parts: reward.custom_reward_function.name
reward.workers: reward.num_workers
reward.model_folder: reward.reward_model.model_path
data.source: dataset dataset_name train_file data.train_files
data.heldout_source: eval_dataset data.val_files
data.fields: data.prompt_key data.reward_fn_key
data.template: chat_template_kwargs chat_template
data.overlong_prompts: data.truncation data.filter_overlong_prompts
compute.dtype: model_init_kwargs bf16 fp16 dtype actor.fsdp_config.dtype
compute.remat: gradient_checkpointing actor_rollout_ref.model.enable_gradient_checkpointing
sampler.cache: cache_implementation
sampler.slots: use_transformers_continuous_batching transformers_continuous_batching_config
sampler.slots: rollout.max_num_seqs
sampler.pages: use_transformers_paged rollout.gpu_memory_utilization
sampler.prefill_chunk_tokens: rollout.enable_chunked_prefill
packing.rows_per_microbatch: per_device_train_batch_size gradient_accumulation_steps
packing.rows_per_microbatch: actor.ppo_micro_batch_size_per_gpu micro_batch_size
packing.row_tokens: actor.use_dynamic_bsz actor.ppo_max_token_len_per_gpu max_seq_length max_length
total_steps: max_steps num_train_epochs epochs trainer.total_training_steps trainer.total_epochs
seed: seed data_seed
run_dir: run output_dir run_name trainer.default_local_dir
checkpoint.every_steps: save_steps trainer.save_freq
checkpoint.keep: save_total_limit trainer.max_actor_ckpt_to_keep
evaluation.every_steps: eval_steps eval_strategy trainer.test_freq trainer.val_before_train
log.wandb: report_to trainer.logger trainer.project_name
log.rollouts: log_completions trainer.rollout_data_dir
log.show_group_every_steps: num_completions_to_print log_unique_prompts
mesh.fsdp: fsdp deepspeed parallelism_config actor.fsdp_config.fsdp_size
mesh.tensor: actor.ulysses_sequence_parallel_size
mesh.decode_tensor: rollout.tensor_model_parallel_size
mesh: trainer.nnodes trainer.n_gpus_per_node
lora.rank: r actor_rollout_ref.model.lora_rank
lora.alpha: lora_alpha actor_rollout_ref.model.lora_alpha
lora.targets: target_modules
model.folder: model model_name model_name_or_path actor_rollout_ref.model.path
rollout.lag: trainer.v1.trainer_mode
"""
SETTINGS = {
    name: setting
    for setting, _, names in (line.partition(": ") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
# Arguments that no setting replaces, and what to do instead.
ADVICE = dict.fromkeys(
    ("resume", "resume_from_checkpoint", "trainer.resume_mode"),
    "the same command resumes a stopped run",
) | dict.fromkeys(
    ("preset", "algorithm", "algorithm.name", "loss"),
    "write the preset behind the config: FILE:grpo or NAME:grpo",
)


def advice(name: str) -> str:
    """Return what replaces an argument of another library, by its name or last part, or ""."""
    if name in ADVICE:
        return ADVICE[name]
    last = name.rpartition(".")[2]
    same_end = {setting for full, setting in SETTINGS.items() if full.rpartition(".")[2] == last}
    by_end = same_end.pop() if len(same_end) == 1 else ""
    known = SETTINGS.get(name) or SETTINGS.get(last) or by_end
    return " and ".join(f"--config.{setting}" for setting in known.split(", ") if setting)
